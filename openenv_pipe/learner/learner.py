"""The learner: one GRPO step on the samples of a step, in optimizer updates and batches.

Shape letter: N trained tokens of a batch.
"""

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from openenv_pipe.algorithms.losses.normalization import Counts
from openenv_pipe.config.schema import TrainerConfig
from openenv_pipe.errors import TrainingError
from openenv_pipe.learner.accumulator import Tally
from openenv_pipe.learner.batches import batches_of
from openenv_pipe.learner.flops import Size, Work, matrix_flops_per_s
from openenv_pipe.learner.metrics import step_metrics
from openenv_pipe.learner.objective import Objective, Tokens
from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.learner.ranks import ALONE, Ranks
from openenv_pipe.models.policy import Policy
from openenv_pipe.types import Batch, Sample


class Learner:
    """Owns the optimizer. The policy's weights change in `update` and nowhere else."""

    def __init__(
        self,
        policy: Policy,
        config: TrainerConfig,
        *,
        max_episode_tokens: int,
        seed: int,
        ranks: Ranks = ALONE,
        optimizer: Optimizer | None = None,
    ) -> None:
        """optimizer: another than the usual one. Each of several ranks has a learner of its own."""
        self.policy = policy
        self._ranks = ranks
        self.optimizer = optimizer or Optimizer(
            policy.trained_parameters(),
            config.optimizer,
            config.steps * config.updates_per_step,
        )
        self._config = config
        self._objective = Objective(config.loss)
        self._work = Work(policy.model)
        self._max_episode_tokens = max_episode_tokens
        self._seed = seed
        if self._objective.needs_reference:
            policy.keep_reference()

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """Trains on the samples of a step once, in `updates_per_step` optimizer steps.

        Returns the step's metrics. Raises TrainingError where a number is not finite.
        """
        _refuse_broken(samples)
        started = time.perf_counter()
        tally = Tally()
        norms: list[float] = []
        lr = self.optimizer.lr
        parts = self._parts(samples, step)
        start_logprobs = self._start_logprobs(parts[1:], tally)
        for number, part in enumerate(parts):
            self._accumulate(part, tally, start_logprobs, first=number == 0)
            self._ranks.sum_gradients(values for _, values in self.policy.trained_parameters())
            norms.append(self.optimizer.step())
        self._ranks.merge(tally)
        metrics = step_metrics(tally, norms, lr)  # waits for the device
        return metrics | self._speed(tally, time.perf_counter() - started)

    def _speed(self, tally: Tally, took_s: float) -> dict[str, float]:
        """Of all ranks, against what the matrix product reaches, which is measured once."""
        reachable = matrix_flops_per_s(
            self.policy.device, self.policy.precision, torch.get_num_threads()
        )
        return {
            "time/learner_tokens_per_s": tally.sum("num_computed") / took_s,
            "time/matrix_tflops": reachable / 1e12,
            "time/mfu": tally.sum("flops") / took_s / (reachable * self._ranks.size),
        }

    def _parts(self, samples: Sequence[Sample], step: int) -> list[list[Sample]]:
        """The samples of each optimizer update, of about equal number, drawn by seed and step."""
        count = min(self._config.updates_per_step, len(samples))
        order = list(range(len(samples)))
        if count > 1:
            random.Random(f"{self._seed}/{step}").shuffle(order)
        return [[samples[index] for index in order[part::count]] for part in range(count)]

    def _batches(self, samples: Sequence[Sample]) -> Iterator[Batch]:
        return batches_of(samples, self._config.tokens_per_batch, self.policy, self._ranks)

    @torch.no_grad()
    def _start_logprobs(
        self, later_parts: Sequence[Sequence[Sample]], tally: Tally
    ) -> deque[torch.Tensor]:
        """Of each batch of the later updates, where the loss asks for it: the weights will have
        changed by then. The first update's own forward pass says it as well."""
        if not self._objective.needs_start_logprobs:
            return deque()
        found: deque[torch.Tensor] = deque()
        for part in later_parts:
            for batch in self._batches(part):
                found.append(self.policy.logprobs(batch, self._config.temperature)[0])
                if batch.counts:
                    tally.add(flops=self._work.forward(_size(batch)))
        return found

    def _accumulate(
        self,
        samples: Sequence[Sample],
        tally: Tally,
        start_logprobs: deque[torch.Tensor],
        *,
        first: bool,
    ) -> None:
        """Adds the gradients of all batches; their split does not change the sum."""
        counts = Counts(
            num_samples=len(samples),
            num_tokens=sum(sum(sample.loss_mask) for sample in samples),
            max_tokens=self._max_episode_tokens,
        )
        for batch in self._batches(samples):
            start_N = start_logprobs.popleft() if start_logprobs and not first else None
            tokens = self._tokens(batch, start_N, first=first)
            if not batch.counts:
                (0.0 * tokens.logprobs.sum()).backward()
                continue
            self._objective.loss(tokens, counts, tally).backward()
            size = _size(batch)
            tally.add(num_computed=size.num_tokens, flops=self._work.forward_and_backward(size))
            if self._objective.needs_reference:
                tally.add(flops=self._work.forward(size))

    def _tokens(self, batch: Batch, start_N: torch.Tensor | None, *, first: bool) -> Tokens:
        """The batch's trained tokens as the current weights see them."""
        temperature, objective = self._config.temperature, self._objective
        reference_N = None
        if objective.needs_reference:
            reference_N = self.policy.reference_logprobs(batch, temperature)
        logprobs_N, entropy_N = self.policy.logprobs(
            batch, temperature, entropy_gradient=objective.needs_entropy_gradient
        )
        return Tokens(
            logprobs=logprobs_N,
            entropy=entropy_N,
            sampled_logprobs=batch.logprobs,
            start_logprobs=logprobs_N.detach() if first else start_N,
            reference_logprobs=reference_N,
            advantages=batch.advantages,
            sample_index=batch.sample_index,
        )


def _size(batch: Batch) -> Size:
    """What samples share counts once."""
    return Size(
        num_tokens=len(batch.token_ids),
        num_contexts=int(batch.positions.sum()) + len(batch.positions),
        num_predicted=len(batch.predictors),
    )


def _refuse_broken(samples: Sequence[Sample]) -> None:
    """NaN among sampled logprobs is counted and said, never averaged away."""
    values = torch.tensor([value for sample in samples for value in sample.logprobs])
    broken = int((~torch.isfinite(values)).sum())
    if broken:
        raise TrainingError(
            f"{broken} of {len(values)} sampled logprobs are not finite; the engine is at fault: "
            "see its log, or train with model.autocast=float32"
        )
