"""The warm start: supervised steps on a scripted policy's replies (behaviour cloning)."""

import random
from collections.abc import Sequence
from typing import Any

from openenv_pipe.algorithms.samples import by_episode
from openenv_pipe.config.schema import WarmStartConfig
from openenv_pipe.learner.batches import batches_of
from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.models.policy import Policy
from openenv_pipe.types import Sample


class WarmStart:
    """Minimises the mean negative logprob of the replies' tokens, at temperature 1."""

    def __init__(
        self, policy: Policy, config: WarmStartConfig, *, tokens_per_batch: int, seed: int
    ) -> None:
        self._policy = policy
        self._config = config
        self._tokens_per_batch = tokens_per_batch
        self.optimizer = Optimizer(policy.trained_parameters(), config.optimizer, config.steps)
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
        num_tokens = sum(sum(sample.loss_mask) for sample in part)
        lr, total = self.optimizer.lr, 0.0
        with self._policy.learning():
            for batch in batches_of(part, self._tokens_per_batch, self._policy):
                logprobs_N, _ = self._policy.logprobs(batch, temperature=1.0)
                loss = -logprobs_N.sum() / num_tokens
                loss.backward()
                total += loss.item()
        return {
            "loss/supervised": total,
            "grad/norm": self.optimizer.step(),
            "lr": lr,
            "tokens/trained": num_tokens,
        }

    def _next_part(self, samples: Sequence[Sample]) -> list[Sample]:
        episodes = by_episode(samples)
        size = min(self._config.episodes_per_step, len(episodes))
        if len(self._unseen) < size:
            again = list(range(len(episodes)))
            self._draw.shuffle(again)
            self._unseen += again
        part, self._unseen = self._unseen[:size], self._unseen[size:]
        return [sample for number in part for sample in episodes[number]]
