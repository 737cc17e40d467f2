"""The learner: one GRPO step on the samples of a step, in optimizer updates and batches.

Shape letters: B rows, T columns, N trained tokens of a batch.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from openenv_pipe.config.schema import LossConfig, TrainerConfig
from openenv_pipe.errors import TrainingError
from openenv_pipe.grpo.losses import clipped_loss, clipped_share, kl_k3, token_weights
from openenv_pipe.grpo.packing import collate, split_by_budget
from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.learner.policy import Policy
from openenv_pipe.types import Batch, Sample


@dataclass(kw_only=True, slots=True)
class _Sums:
    """What is summed over the batches of a step, for its metrics."""

    num_tokens: int = 0
    policy_loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    ratio_max: float = 0.0
    mismatch: float = 0.0
    mismatch_max: float = 0.0
    num_first_tokens: int = 0  # tokens of the first update: only they meet the sampler's weights


class Learner:
    """Owns the optimizer. The policy's weights change in `update` and nowhere else."""

    def __init__(
        self, policy: Policy, config: TrainerConfig, *, max_episode_tokens: int, seed: int
    ) -> None:
        self.policy = policy
        self.optimizer = Optimizer(
            policy.trained_parameters(),
            config.optimizer,
            config.steps * config.updates_per_step,
        )
        self._config = config
        self._max_episode_tokens = max_episode_tokens
        self._seed = seed
        if config.loss.kl_coef:
            policy.keep_reference()

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """Trains on the samples of a step once, in `updates_per_step` optimizer steps.

        Returns the step's metrics. Raises TrainingError where a number is not finite.
        """
        _refuse_broken(samples)
        sums = _Sums()
        norms: list[float] = []
        lr = self.optimizer.lr
        for number, part in enumerate(self._parts(samples, step)):
            self._accumulate(part, sums, first=number == 0)
            norms.append(self.optimizer.step())
        return _metrics(sums, norms, lr)

    def _parts(self, samples: Sequence[Sample], step: int) -> list[list[Sample]]:
        """The samples of each optimizer update, of about equal number, drawn by seed and step."""
        count = min(self._config.updates_per_step, len(samples))
        order = list(range(len(samples)))
        if count > 1:
            random.Random(f"{self._seed}/{step}").shuffle(order)
        return [[samples[index] for index in order[part::count]] for part in range(count)]

    def _accumulate(self, samples: Sequence[Sample], sums: _Sums, *, first: bool) -> None:
        """Adds the gradients of all batches; their split does not change the sum."""
        num_tokens = sum(sum(sample.loss_mask) for sample in samples)
        lengths = [len(sample.token_ids) for sample in samples]
        for indices in split_by_budget(lengths, self._config.tokens_per_batch):
            batch = collate([samples[index] for index in indices], self.policy.device)
            weights_N = token_weights(
                batch.loss_mask,
                loss_type=self._config.loss.type,
                num_samples=len(samples),
                num_tokens=num_tokens,
                max_tokens=self._max_episode_tokens,
            )
            self._backward(batch, weights_N, sums, first=first)

    def _backward(self, batch: Batch, weights_N: torch.Tensor, sums: _Sums, *, first: bool) -> None:
        loss: LossConfig = self._config.loss
        temperature = self._config.temperature
        reference_N = self.policy.reference_logprobs(batch, temperature) if loss.kl_coef else None
        logprobs_N, entropy_N = self.policy.logprobs(batch, temperature)
        old_N, advantages_N = batch.logprobs[batch.loss_mask], batch.advantages[batch.loss_mask]
        clips = {"clip_low": loss.clip_low, "clip_high": loss.clip_high}
        loss_N, ratio_N = clipped_loss(logprobs_N, old_N, advantages_N, **clips)
        objective = (weights_N * loss_N).sum()
        sums.policy_loss += objective.item()
        if reference_N is not None:
            kl_N = kl_k3(logprobs_N, reference_N)
            objective = objective + loss.kl_coef * (weights_N * kl_N).sum()
            sums.kl += kl_N.detach().sum().item()
        objective.backward()
        sums.num_tokens += len(logprobs_N)
        sums.entropy += entropy_N.sum().item()
        sums.clipped += clipped_share(ratio_N, advantages_N, **clips).item()
        sums.ratio_max = max(sums.ratio_max, ratio_N.max().item())
        if first:
            mismatch_N = (logprobs_N.detach() - old_N).abs()
            sums.num_first_tokens += len(mismatch_N)
            sums.mismatch += mismatch_N.sum().item()
            sums.mismatch_max = max(sums.mismatch_max, mismatch_N.max().item())


def _refuse_broken(samples: Sequence[Sample]) -> None:
    """NaN among sampled logprobs is counted and said, never averaged away."""
    values = torch.tensor([value for sample in samples for value in sample.logprobs])
    broken = int((~torch.isfinite(values)).sum())
    if broken:
        raise TrainingError(
            f"{broken} of {len(values)} sampled logprobs are not finite; the engine is at fault: "
            "see its log, or train with model.autocast=float32"
        )


def _metrics(sums: _Sums, norms: Sequence[float], lr: float) -> dict[str, float]:
    return {
        "loss/policy": sums.policy_loss / len(norms),
        "loss/kl": sums.kl / sums.num_tokens,
        "loss/entropy": sums.entropy / sums.num_tokens,
        "clip/share": sums.clipped / sums.num_tokens,
        "ratio/max": sums.ratio_max,
        "mismatch/mean": sums.mismatch / sums.num_first_tokens,
        "mismatch/max": sums.mismatch_max,
        "grad/norm": max(norms),
        "lr": lr,
        "tokens/trained": sums.num_tokens,
    }
