"""GRPO and the warm start of a sharded policy, on all ranks."""

from collections.abc import Sequence

import torch

from openenv_pipe.algorithms.losses.normalization import Uncomputed
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.extras.devices.fsdp import ShardedOptimizer, ShardedPolicy
from openenv_pipe.extras.devices.ranks import ConnectedRanks, collective
from openenv_pipe.learner.learner import NOTHING, Learner
from openenv_pipe.learner.supervised import WarmStart
from openenv_pipe.types import Sample


class ShardedLearner(Learner):
    """A `Learner` of which each rank has one. A call on rank 0 is a call on all ranks."""

    def __init__(self, policy: ShardedPolicy, config: RunConfig, ranks: ConnectedRanks) -> None:
        trainer = config.trainer
        super().__init__(
            policy,
            trainer,
            max_episode_tokens=config.max_episode_tokens,
            seed=config.seed,
            ranks=ranks,
            optimizer=ShardedOptimizer(
                policy.trained_parameters(),
                trainer.optimizer,
                trainer.steps * trainer.total_updates_per_step,
                ranks,
            ),
        )

    @collective("learner")
    def update(
        self,
        samples: Sequence[Sample],
        step: int,
        uncomputed: Uncomputed = NOTHING,
        replayed: Sequence[Sample] = (),
    ) -> dict[str, float]:
        return super().update(samples, step, uncomputed, replayed)

    @collective("learner")
    def kl_from_sampler(self, samples: Sequence[Sample]) -> float:
        return super().kl_from_sampler(samples)


class ShardedWarmStart(WarmStart):
    """A `WarmStart` of which each rank has one. Rank 0 draws the samples of a step for all."""

    def __init__(self, policy: ShardedPolicy, config: RunConfig, ranks: ConnectedRanks) -> None:
        settings = config.trainer.warm_start
        super().__init__(
            policy,
            settings,
            tokens_per_batch=config.trainer.tokens_per_batch,
            seed=config.seed,
            ranks=ranks,
            optimizer=ShardedOptimizer(
                policy.trained_parameters(), settings.optimizer, settings.steps, ranks
            ),
        )

    def _learn(self, part: Sequence[Sample]) -> tuple[float, float]:
        return self.learn(part, torch.initial_seed())

    @collective("warm_start")
    def learn(self, part: Sequence[Sample], seed: int) -> tuple[float, float]:
        """Take an optimizer step; return loss and norm. seed: of dropout, on rank 0."""
        if self._ranks.rank:
            torch.manual_seed(seed + self._ranks.rank)
        return super()._learn(part)
