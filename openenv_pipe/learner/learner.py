"""The learner: one GRPO step on the samples of a step, split into optimizer updates and batches.

Shape letter: N trained tokens of a batch.
"""

import math
import random
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product

import torch

from openenv_pipe.algorithms.batch import Batch
from openenv_pipe.algorithms.losses.normalization import Counts, Uncomputed
from openenv_pipe.algorithms.packing import num_contexts, pack
from openenv_pipe.algorithms.samples import by_episode, num_trained_tokens
from openenv_pipe.config.schema import PythonLossConfig, TrainerConfig
from openenv_pipe.errors import TrainingError
from openenv_pipe.learner.accumulator import MetricAccumulator
from openenv_pipe.learner.batches import UpdateBatches, batches_of
from openenv_pipe.learner.flops import count_flops, matrix_flops_per_s
from openenv_pipe.learner.metrics import step_metrics
from openenv_pipe.learner.objective import Objective, Tokens
from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.learner.parallel_batches import count_parallel, run_parallel
from openenv_pipe.learner.ranks import SINGLE_RANK, Ranks
from openenv_pipe.learner.token_recorder import TokenRecorder
from openenv_pipe.models.flop_count import Size
from openenv_pipe.models.forward.router_balance import (
    balance_loss,
    recorded_routing,
    reject_without_routers,
)
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.teacher import teacher_divergence
from openenv_pipe.types import Sample, TrainedTokens

NOTHING = Uncomputed()


class Learner:
    """Owns the optimizer, and changes the policy's weights in `update` only."""

    def __init__(
        self,
        policy: Policy,
        config: TrainerConfig,
        *,
        max_episode_tokens: int,
        seed: int,
        ranks: Ranks = SINGLE_RANK,
        optimizer: Optimizer | None = None,
    ) -> None:
        """optimizer: None builds the configured one. ranks: each rank has its own learner."""
        self.policy = policy
        self._ranks = ranks
        self.optimizer = optimizer or Optimizer(
            policy.trained_parameters(),
            config.optimizer,
            config.steps * config.total_updates_per_step,
            precision=policy.precision,
        )
        self._config = config
        self._objective = Objective(config.loss)
        reject_without_routers(policy.decoder, config.loss.router_aux_coef)
        self._flops = count_flops(policy.model)
        self._teacher_flops = {
            name: count_flops(each.model) for name, each in policy.teachers.items()
        }
        self._max_episode_tokens = max_episode_tokens
        self._seed = seed
        self.trained_tokens: list[TrainedTokens | None] = []  # of each sample of the last update
        if config.loss.kl.has_frozen_policy:
            policy.keep_reference()

    def update(
        self,
        samples: Sequence[Sample],
        step: int,
        uncomputed: Uncomputed = NOTHING,
        replayed: Sequence[Sample] = (),
    ) -> dict[str, float]:
        """Train on the samples of a step in `passes_per_step` passes over the same updates.

        Steps before this one may have had no samples; the learning rate is this step's anyway.

        uncomputed: what the loss counts besides the samples
        replayed: samples of earlier episodes, only for the cross entropy of `trainer.replay`

        Returns the step's metrics.

        Raises TrainingError: a sampled logprob or the gradient's norm is not finite.
        """
        _reject_broken(samples)
        started = time.perf_counter()
        accumulator, recorder = MetricAccumulator(), TokenRecorder(samples)
        norms: list[float] = []
        self._refresh_reference(step)
        self.optimizer.num_steps_taken = (step - 1) * self._config.total_updates_per_step
        lr, num_passes = self.optimizer.lr, self._config.passes_per_step
        updates = self._updates(samples, step, uncomputed, accumulator, replayed)
        for number, update in product(range(num_passes), updates):
            self._accumulate(update, accumulator, recorder, is_again=number > 0)
            self._ranks.sum_gradients(values for _, values in self.policy.trained_parameters())
            norms.append(self.optimizer.step())
        self._ranks.merge(accumulator)
        self.trained_tokens = recorder.collected(self._ranks)
        metrics = step_metrics(accumulator, norms, lr, num_passes)  # waits for the device
        return metrics | self._speed(accumulator, time.perf_counter() - started)

    def _refresh_reference(self, step: int) -> None:
        """Make the present policy the reference, if a refresh is due since the last update.

        No weight has changed since that update. Its step follows from the optimizer's count, which
        a checkpoint has, so a resumed run refreshes at the same steps.
        """
        every = self._config.loss.kl.refresh_every
        if every is None or not self._objective.needs_reference:
            return
        last = math.ceil(self.optimizer.num_steps_taken / self._config.total_updates_per_step)
        if (step - 1) // every > max(0, last - 1) // every:
            self.policy.keep_reference()

    @torch.no_grad()
    def kl_from_sampler(self, samples: Sequence[Sample]) -> float:
        """Estimate KL(sampler || policy) in nats a token, on the sampler's own tokens.

        It is the mean of k1 = log(sampler / policy), which no single token dominates.
        """
        budget, estimates = self._config.tokens_per_batch, []
        for batch in batches_of(samples, budget, self.policy):
            logprobs_N, _ = self.policy.logprobs(batch, self._config.temperature)
            estimates.append(batch.logprobs - logprobs_N)
        return torch.cat(estimates).mean().item()

    def _speed(self, accumulator: MetricAccumulator, took_s: float) -> dict[str, float]:
        """Return the speed of all ranks together, also relative to a plain matrix product's."""
        reachable = matrix_flops_per_s(
            self.policy.device, self.policy.precision, torch.get_num_threads()
        )
        return {
            "time/learner_tokens_per_s": accumulator.sum("num_computed") / took_s,
            "time/matrix_tflops": reachable / 1e12,
            "time/mfu": accumulator.sum("flops") / took_s / (reachable * self._ranks.size),
        }

    def _updates(
        self,
        samples: Sequence[Sample],
        step: int,
        uncomputed: Uncomputed,
        accumulator: MetricAccumulator,
        replayed: Sequence[Sample],
    ) -> list[UpdateBatches]:
        """Split the episodes into the updates of a pass, of about equal size, by seed and step.

        All samples of an episode are in the same update. Replayed ones are shared out likewise.
        All updates are built before the first of them changes the weights.
        """
        episodes = by_episode(samples)
        num_tokens = num_trained_tokens(samples)
        num_updates = min(self._config.updates_per_step, len(episodes))
        order = list(range(len(episodes)))
        if num_updates > 1:
            random.Random(f"{self._seed}/{step}").shuffle(order)
        updates = []
        for number in range(num_updates):
            chosen = order[number::num_updates]
            part = [sample for index in chosen for sample in episodes[index]]
            budget = self._config.tokens_per_batch
            num_parallel = 1  # A user's function may not expect calls from several threads.
            if not isinstance(self._config.loss, PythonLossConfig):
                num_parallel = count_parallel(self.policy, part, budget, self._ranks)
            environment = self._objective.needs_environment
            batches = [
                batch
                for same in self._by_teacher(part)
                for batch in batches_of(
                    same, budget, self.policy, self._ranks, num_parallel, environment=environment
                )
            ]
            counts = Counts(
                num_environment_tokens=_num_answered(part) if environment else 0,
                num_episodes=len(chosen) * (1 + uncomputed.num_episodes / len(episodes)),
                num_tokens=num_trained_tokens(part) * (1 + uncomputed.num_tokens / num_tokens),
                num_computed_tokens=num_trained_tokens(part),
                max_tokens=self._max_episode_tokens,
            )
            again = [each for one in by_episode(replayed)[number::num_updates] for each in one]
            is_first = number == 0
            is_reused = not is_first or self._config.passes_per_step > 1
            needs_start = self._objective.needs_start_logprobs and is_reused
            updates.append(
                UpdateBatches(
                    batches=batches,
                    counts=counts,
                    replayed=list(
                        batches_of(again, budget, self.policy, self._ranks, num_parallel)
                    ),
                    num_replayed_tokens=num_trained_tokens(again),
                    start_logprobs=self._logprobs(batches, accumulator) if needs_start else None,
                    is_first=is_first,
                    num_parallel=num_parallel,
                )
            )
        return updates

    def _by_teacher(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Split the samples by the model that is their reference."""
        found: dict[int, list[Sample]] = {}
        for sample in samples:
            found.setdefault(id(self.policy.teachers.get(sample.env)), []).append(sample)
        return list(found.values())

    @torch.no_grad()
    def _logprobs(
        self, batches: Sequence[Batch], accumulator: MetricAccumulator
    ) -> list[torch.Tensor]:
        """Compute each batch's logprobs of trained tokens under the current weights, [N] each."""
        accumulator.add(
            flops=sum(self._flops.forward(_size(batch)) for batch in batches if batch.counts)
        )
        return [self.policy.logprobs(batch, self._config.temperature)[0] for batch in batches]

    def _accumulate(
        self,
        update: UpdateBatches,
        accumulator: MetricAccumulator,
        recorder: TokenRecorder,
        *,
        is_again: bool,
    ) -> None:
        """Accumulate the gradients of all batches.

        Their sum does not depend on the split into batches, except for the routers' balance loss.

        is_again: an earlier pass has recorded the tokens
        """
        is_first = update.is_first and not is_again

        def learn(policy: Policy, number: int) -> MetricAccumulator:
            if number >= len(update.batches):
                batch = update.replayed[number - len(update.batches)]
                return self._repeat(policy, batch, update.num_replayed_tokens)
            batch, found = update.batches[number], MetricAccumulator()
            start_N = update.start_logprobs[number] if update.start_logprobs else None
            tokens = self._tokens(policy, batch, start_N, is_first=is_first)
            if not batch.counts:
                (0.0 * tokens.logprobs.sum()).backward()
                return found
            self._objective.loss(tokens, update.counts, found).backward()
            if not is_again:
                recorder.add(batch, tokens)
            size = _size(batch)
            flops = self._flops.forward_and_backward(size)
            if self._objective.needs_reference and batch.samples[0].reference_logprobs is None:
                flops += self._teacher_flops.get(batch.env, self._flops).forward(size)
            found.add(num_computed=size.num_tokens, flops=flops)
            return found

        num_batches = len(update.batches) + len(update.replayed)
        for found in run_parallel(self.policy, update.num_parallel, num_batches, learn):
            accumulator.merge(found)

    def _repeat(self, policy: Policy, batch: Batch, num_tokens: int) -> MetricAccumulator:
        """Accumulate the gradient of replayed episodes: the cross entropy of the agent's tokens.

        num_tokens: of the agent, in all replayed episodes of the update
        """
        assert self._config.replay is not None
        found = MetricAccumulator()
        logprobs_N, _ = policy.logprobs(batch, self._config.temperature)
        surprise = -logprobs_N.sum() * float(batch.counts)
        loss = self._config.replay.coef * surprise / num_tokens
        loss.backward()
        if batch.counts:
            size = _size(batch)
            flops = self._flops.forward_and_backward(size)
            found.add(loss=loss, replay=surprise, num_replay=len(logprobs_N))
            found.add(num_computed=size.num_tokens, flops=flops)
        return found

    @torch.no_grad()
    def _reference_logprobs(self, policy: Policy, batch: Batch) -> torch.Tensor:
        """Return the reference's logprobs [N]; with hints, those of the replies after the hints.

        A sample without a hint is its own reference, so that it has no divergence.
        """
        if batch.samples[0].reference_logprobs is not None:
            return served_logprobs(batch).to(policy.device)
        temperature = self._config.temperature
        if self._config.loss.kl.used_hint is None:
            return policy.reference_logprobs(batch, temperature)
        hinted = [each.hinted or each for each in batch.samples]
        with_hints = pack(hinted, share=batch.is_shared, device=policy.device)
        return policy.logprobs(with_hints, temperature)[0]

    def _tokens(
        self, policy: Policy, batch: Batch, start_N: torch.Tensor | None, *, is_first: bool
    ) -> Tokens:
        """Run the forward passes of a batch and return its trained tokens."""
        temperature, objective = self._config.temperature, self._objective
        reference_N = divergence_N = None
        if objective.needs_reference and not objective.needs_divergence:
            reference_N = self._reference_logprobs(policy, batch)
        balances = self._config.loss.router_aux_coef > 0
        nothing: AbstractContextManager[list[torch.Tensor]] = nullcontext([])
        with recorded_routing(policy.decoder) if balances else nothing as routing:
            hidden_UH = policy.predictors_hidden(batch) if objective.needs_divergence else None
            logprobs_U, entropy_U = policy.predicted_logprobs(
                batch,
                temperature,
                entropy_gradient=objective.needs_entropy_gradient,
                hidden_UH=hidden_UH,
            )
        if hidden_UH is not None:
            divergence_N = teacher_divergence(policy, hidden_UH, batch, temperature)
        logprobs_N = logprobs_U.index_select(0, batch.places)
        answers = batch.environment_places
        return Tokens(
            logprobs=logprobs_N,
            entropy=entropy_U.index_select(0, batch.places),
            environment_logprobs=None if answers is None else logprobs_U.index_select(0, answers),
            sampled_logprobs=batch.logprobs,
            start_logprobs=logprobs_N.detach() if is_first and start_N is None else start_N,
            reference_logprobs=reference_N,
            divergence=divergence_N,
            advantages=batch.advantages,
            sample_index=batch.sample_index,
            episode_tokens=batch.episode_tokens,
            router_balance=balance_loss(policy.decoder, routing, batch) if balances else None,
        )


def served_logprobs(batch: Batch) -> torch.Tensor:
    """Return the logprobs [N] that a teacher's server has given the batch's samples."""
    return torch.tensor(
        [
            logprob
            for sample in batch.samples
            for logprob, is_trained in zip(
                sample.reference_logprobs or (), sample.loss_mask, strict=True
            )
            if is_trained
        ]
    )


def _num_answered(samples: Sequence[Sample]) -> int:
    """Count the environment's tokens of samples that have trained tokens."""
    return sum(sum(sample.environment_mask) for sample in samples if any(sample.loss_mask))


def _size(batch: Batch) -> Size:
    """Return the size of a batch; tokens that samples share count once."""
    return Size(
        num_tokens=len(batch.token_ids),
        num_contexts=num_contexts(batch.nodes),
        num_finished=len(batch.finished),
        num_predicted=len(batch.predictors),
    )


def _reject_broken(samples: Sequence[Sample]) -> None:
    """Raise TrainingError if a sampled logprob is not finite."""
    values = torch.tensor([value for sample in samples for value in sample.logprobs])
    broken = int((~torch.isfinite(values)).sum())
    if broken:
        raise TrainingError(
            f"{broken} of {len(values)} sampled logprobs are not finite; the engine is at fault: "
            "see its log, or train with model.autocast=float32"
        )
