"""The warm start: supervised steps on given replies (behaviour cloning)."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from openenv_pipe.algorithms.samples import by_episode, num_trained_tokens
from openenv_pipe.config.schema import WarmStartConfig
from openenv_pipe.learner.batches import batches_of
from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.learner.parallel_batches import count_parallel, run_parallel
from openenv_pipe.learner.ranks import SINGLE_RANK, Ranks
from openenv_pipe.models.policy import Policy
from openenv_pipe.types import Sample


class WarmStart:
    """Minimises the mean negative logprob of the replies' tokens, at temperature 1."""

    def __init__(
        self,
        policy: Policy,
        config: WarmStartConfig,
        *,
        tokens_per_batch: int,
        seed: int,
        ranks: Ranks = SINGLE_RANK,
        optimizer: Optimizer | None = None,
    ) -> None:
        """optimizer: None builds the configured one."""
        self._policy = policy
        self._ranks = ranks
        self._config = config
        self._tokens_per_batch = tokens_per_batch
        self.optimizer = optimizer or Optimizer(
            policy.trained_parameters(), config.optimizer, config.steps, precision=policy.precision
        )
        self._draw = random.Random(f"{seed}/warm start")
        self._unseen: list[int] = []  # indices of episodes not yet used in this pass

    def state(self) -> dict[str, Any]:
        """Return the sampling state as JSON. The optimizer is saved separately."""
        version, words, gauss = self._draw.getstate()
        return {"draw": [version, list(words), gauss], "unseen": self._unseen}

    def restore(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["draw"]
        self._draw.setstate((version, tuple(words), gauss))
        self._unseen = list(state["unseen"])

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Take one optimizer step on some episodes; each is used once per pass over all."""
        part = self._next_part(samples)
        lr = self.optimizer.lr
        loss, norm = self._learn(part)
        return {
            "loss/supervised": loss,
            "grad/norm": norm,
            "lr": lr,
            "tokens/trained": num_trained_tokens(part),
        }

    def _learn(self, part: Sequence[Sample]) -> tuple[float, float]:
        """Take an optimizer step; return the loss and the gradient's norm."""
        budget, num_tokens = self._tokens_per_batch, num_trained_tokens(part)
        with with_dropout(self._policy):
            num_parallel = count_parallel(self._policy, part, budget, self._ranks)
            batches = list(batches_of(part, budget, self._policy, self._ranks, num_parallel))

            def learn(policy: Policy, number: int) -> float:
                logprobs_N, _ = policy.logprobs(batches[number], 1.0)
                loss = -logprobs_N.sum() * float(batches[number].counts) / num_tokens
                loss.backward()
                return loss.item()

            losses = run_parallel(self._policy, num_parallel, len(batches), learn)
        total = self._ranks.sum(torch.tensor(sum(losses), dtype=torch.float64)).item()
        return total, self.optimizer.step()

    def _next_part(self, samples: Sequence[Sample]) -> list[Sample]:
        episodes = by_episode(samples)
        size = min(self._config.episodes_per_step, len(episodes))
        if len(self._unseen) < size:
            again = list(range(len(episodes)))
            self._draw.shuffle(again)
            self._unseen += again
        part, self._unseen = self._unseen[:size], self._unseen[size:]
        return [sample for number in part for sample in episodes[number]]


@contextlib.contextmanager
def with_dropout(policy: Policy) -> Iterator[None]:
    """Within the block, enable dropout, if the model has any.

    It is off while the policy samples and in GRPO, whose ratios it would make noisy.
    """
    policy.model.train()
    try:
        yield
    finally:
        policy.model.eval()
