"""The loss of an update: the configured sum of policy loss, KL penalty, entropy bonus and ECHO.

Its input is the trained tokens in one row, independent of padding and packing. It also adds the
learner's metrics to a MetricAccumulator. Shape letter: N trained tokens of a batch.
"""

from dataclasses import dataclass

import torch

from openenv_pipe.algorithms.losses.custom import LossTokens, UserLoss
from openenv_pipe.algorithms.losses.importance_weights import (
    Correction,
    is_far_off_policy,
    masked_weights,
    truncated_weights,
)
from openenv_pipe.algorithms.losses.kl import kl_estimate, kl_loss
from openenv_pipe.algorithms.losses.normalization import Counts, token_weights
from openenv_pipe.algorithms.losses.policy import (
    PolicyLoss,
    cispo_loss,
    grpo_loss,
    gspo_loss,
    sapo_loss,
)
from openenv_pipe.algorithms.losses.ratios import ratios, sample_means
from openenv_pipe.config.schema import LossConfig, PythonLossConfig, SapoLossConfig
from openenv_pipe.learner.accumulator import MetricAccumulator


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The trained tokens of a batch; tensors are [N] unless their comment differs.

    Only what the trainer computes with its current weights may have a gradient.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    sampled_logprobs: torch.Tensor
    start_logprobs: torch.Tensor | None  # the trainer's when the step began; None: not computed
    reference_logprobs: torch.Tensor | None  # None: not needed
    advantages: torch.Tensor
    sample_index: torch.Tensor  # int64: the sample of the batch that a token belongs to
    episode_tokens: torch.Tensor  # float32: trained tokens of the episode of each token
    divergence: torch.Tensor | None = None  # KL(policy || teacher) over the vocabulary
    environment_logprobs: torch.Tensor | None = None  # [E], of the environment's tokens
    router_balance: torch.Tensor | None = None  # a scalar: the routers' load-balancing loss


class Objective:
    """Computes a batch's contribution to the loss of the whole update."""

    def __init__(self, config: LossConfig) -> None:
        """Raises ConfigError if a loss of `type: python` cannot be used."""
        self._config = config
        self._user_loss = UserLoss(config) if isinstance(config, PythonLossConfig) else None

    @property
    def needs_start_logprobs(self) -> bool:
        """True if the loss uses the trainer's logprobs from the beginning of the step."""
        return self._config.correction.type != "none"

    @property
    def needs_reference(self) -> bool:
        return self._config.kl.coef > 0

    @property
    def needs_divergence(self) -> bool:
        """True if the KL term is over the whole vocabulary instead of the sampled tokens."""
        return self.needs_reference and self._config.kl.estimator == "exact"

    @property
    def needs_environment(self) -> bool:
        """True if the loss has a term for the environment's tokens."""
        return self._config.echo_coef > 0

    @property
    def needs_entropy_gradient(self) -> bool:
        return self._config.entropy_coef > 0

    def loss(self, tokens: Tokens, counts: Counts, accumulator: MetricAccumulator) -> torch.Tensor:
        """Return a scalar with a gradient; the sum over all batches is the loss of the update."""
        old_N = tokens.sampled_logprobs
        correction = None
        if self.needs_start_logprobs:
            assert tokens.start_logprobs is not None
            old_N = tokens.start_logprobs
            correction = self._correction(old_N, tokens)
        policy = self._policy_loss(tokens, old_N)
        loss_N = policy.loss if correction is None else policy.loss * correction.weight
        if self._config.off_policy_limit is not None:
            left_out_N = is_far_off_policy(
                tokens.logprobs,
                tokens.sampled_logprobs,
                tokens.advantages,
                tokens.sample_index,
                limit=self._config.off_policy_limit,
            )
            loss_N = loss_N.masked_fill(left_out_N, 0.0)
            accumulator.add(off_policy=left_out_N)
        weights_N = token_weights(
            tokens.episode_tokens, normaliser=self._config.normalise, counts=counts
        )
        loss = (weights_N * loss_N).sum()
        accumulator.add(policy_loss=loss)
        loss = self._config.policy_coef * loss
        if self.needs_reference:
            loss = loss + self._kl_part(tokens, old_N, correction, weights_N, accumulator)
        if self.needs_entropy_gradient:
            bonus = self._config.entropy_coef * tokens.entropy.sum() / counts.num_tokens
            loss = loss - bonus
        if tokens.environment_logprobs is not None and counts.num_environment_tokens:
            surprise = -tokens.environment_logprobs.sum()
            loss = loss + self._config.echo_coef * surprise / counts.num_environment_tokens
            accumulator.add(echo=surprise, num_echo=len(tokens.environment_logprobs))
        if tokens.router_balance is not None:
            share = len(tokens.logprobs) / counts.num_computed_tokens
            loss = loss + self._config.router_aux_coef * share * tokens.router_balance
            accumulator.add(router_balance=tokens.router_balance.detach() * len(tokens.logprobs))
        accumulator.add(loss=loss)
        _count(tokens, policy, accumulator)
        _count_mismatch(tokens, accumulator)
        if correction is not None:
            accumulator.add(correction=correction.weight, bounded=correction.bounded)
        return loss

    def _policy_loss(self, tokens: Tokens, old_N: torch.Tensor) -> PolicyLoss:
        config = self._config
        if isinstance(config, PythonLossConfig):
            assert self._user_loss is not None
            return self._user_loss(
                LossTokens(
                    logprobs=tokens.logprobs,
                    old_logprobs=old_N,
                    advantages=tokens.advantages,
                    sample_index=tokens.sample_index,
                )
            )
        given = (tokens.logprobs, old_N, tokens.advantages)
        if isinstance(config, SapoLossConfig):
            return sapo_loss(
                *given, tau_positive=config.tau_positive, tau_negative=config.tau_negative
            )
        low, high, largest = config.clip_low, config.clip_high, config.max_ratio
        match config.type:
            case "grpo":
                return grpo_loss(*given, clip_low=low, clip_high=high, max_ratio=largest)
            case "gspo":
                index = tokens.sample_index
                return gspo_loss(*given, index, clip_low=low, clip_high=high, max_ratio=largest)
            case "cispo":
                return cispo_loss(*given, clip_low=low, clip_high=high)

    def _correction(self, old_N: torch.Tensor, tokens: Tokens) -> Correction:
        config, log_ratios_N = self._config.correction, old_N - tokens.sampled_logprobs
        if config.type in ("geometric", "geometric_mask"):
            log_ratios_N = sample_means(log_ratios_N, tokens.sample_index)
        match config.type:
            case "truncate" | "geometric":
                return truncated_weights(log_ratios_N, high=config.high)
            case "mask" | "geometric_mask":
                return masked_weights(log_ratios_N, low=config.low, high=config.high)
        raise AssertionError(config.type)

    def _kl_part(
        self,
        tokens: Tokens,
        old_N: torch.Tensor,
        correction: Correction | None,
        weights_N: torch.Tensor,
        accumulator: MetricAccumulator,
    ) -> torch.Tensor:
        config = self._config.kl
        if config.estimator == "exact":
            assert tokens.divergence is not None
            accumulator.add(kl=tokens.divergence.detach())
            return config.coef * (weights_N * tokens.divergence).sum()
        assert tokens.reference_logprobs is not None
        estimate_N = kl_estimate(tokens.logprobs, tokens.reference_logprobs, config.estimator)
        accumulator.add(kl=estimate_N)
        if config.importance_weights:
            ratio_N = ratios(tokens.logprobs - old_N)
            if correction is not None:
                ratio_N = ratio_N * correction.weight
            estimate_N = kl_loss(estimate_N, ratio_N, config.estimator)
        return config.coef * (weights_N * estimate_N).sum()


def _count(tokens: Tokens, policy: PolicyLoss, accumulator: MetricAccumulator) -> None:
    advantages_N = tokens.advantages
    accumulator.add(
        num_tokens=len(advantages_N),
        entropy=tokens.entropy,
        clipped_low=policy.clipped_low,
        clipped_high=policy.clipped_high,
        advantage=advantages_N.double(),
        advantage_square=advantages_N.double().square(),
    )
    accumulator.highest(
        ratio=policy.ratio,
        negative_ratio=-policy.ratio,
        advantage=advantages_N,
        negative_advantage=-advantages_N,
    )


def _count_mismatch(tokens: Tokens, accumulator: MetricAccumulator) -> None:
    """Measure how far the sampler's logprobs are from the trainer's start logprobs."""
    if tokens.start_logprobs is None:
        return
    difference_N = tokens.start_logprobs - tokens.sampled_logprobs
    weight_N = ratios(difference_N).double()
    accumulator.add(
        num_compared=len(difference_N),
        mismatch=difference_N.abs(),
        mismatch_kl=-difference_N.double(),
        weight=weight_N,
        weight_square=weight_N.square(),
    )
    accumulator.highest(mismatch=difference_N.abs())
