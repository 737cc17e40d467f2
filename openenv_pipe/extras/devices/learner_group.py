"""A learner on several devices, as seen from rank 0, which is the run's own process.

With `parallel: data` the run's policy is whole in this process, and has a copy in each worker. Only
GRPO is distributed: rank 0 does the warm start alone and then broadcasts its result. With
`parallel: fsdp` (`ShardedLearner`) each rank holds a shard of the policy from the beginning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from openenv_pipe.algorithms.losses.normalization import Uncomputed
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.extras.devices.fsdp import ShardedOptimizer, ShardedPolicy
from openenv_pipe.extras.devices.ranks import ConnectedRanks, collective
from openenv_pipe.extras.devices.workers import Workers
from openenv_pipe.learner.learner import NOTHING, Learner
from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.learner.supervised import WarmStart
from openenv_pipe.models.policy import Policy
from openenv_pipe.system.out_of_memory import UPDATE
from openenv_pipe.types import Sample

OUT_OF_MEMORY_STAGE = UPDATE


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


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayout:
    """Shapes and dtypes that workers need before rank 0 broadcasts weights and optimizer state."""

    packs_rows: bool
    attention: str
    num_reference: int | None
    optimizer: Mapping[str, tuple[torch.Size, torch.dtype]]
    num_steps_taken: int

    @classmethod
    def of(cls, policy: Policy, optimizer: Optimizer) -> "StateLayout":
        return cls(
            packs_rows=policy.packs_rows,
            attention=policy.attention,
            num_reference=None if policy.reference is None else len(policy.reference),
            optimizer={key: (t.shape, t.dtype) for key, t in optimizer.tensors().items()},
            num_steps_taken=optimizer.num_steps_taken,
        )

    def receive(self, policy: Policy, ranks: ConnectedRanks) -> list[torch.Tensor] | None:
        """Receive rank 0's weights into the policy; return the reference's, if there are any."""
        policy.packs_rows = self.packs_rows
        if policy.attention != self.attention:
            policy.attention = self.attention
        reference = None
        if self.num_reference is not None:
            trained = policy.trained_parameters()[: self.num_reference]
            reference = [torch.empty_like(values.data) for _, values in trained]
        broadcast_weights(policy, reference, ranks)
        return reference

    def broadcast_optimizer(
        self,
        target: Optimizer,
        ranks: ConnectedRanks,
        device: torch.device,
        given: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Load the state that rank 0 passes as `given` into `target`, on every rank."""
        state = {}
        for key, (shape, dtype) in self.optimizer.items():
            state[key] = (
                given[key].to(device) if given else torch.empty(shape, dtype=dtype, device=device)
            )
            ranks.broadcast(state[key])
        target.load(state, self.num_steps_taken)


def broadcast_weights(
    policy: Policy, reference: Sequence[torch.Tensor] | None, ranks: ConnectedRanks
) -> None:
    trained = [parameter.data for _, parameter in policy.trained_parameters()]
    for values in (*trained, *(reference or ())):
        ranks.broadcast(values)


class LearnerGroup(Learner):
    def __init__(self, policy: Policy, config: RunConfig, workers: Workers) -> None:
        super().__init__(
            policy,
            config.trainer,
            max_episode_tokens=config.max_episode_tokens,
            seed=config.seed,
            ranks=workers.ranks,
        )
        self._run_config = config
        self._workers = workers
        self._has_started = False

    def update(
        self,
        samples: Sequence[Sample],
        step: int,
        uncomputed: Uncomputed = NOTHING,
        replayed: Sequence[Sample] = (),
    ) -> dict[str, float]:
        """Do what `Learner.update` does, on all ranks. The first call starts the workers."""
        if not self._has_started:
            self._start_workers()
        with self._workers.running("learner.update", samples, step, uncomputed, replayed):
            return super().update(samples, step, uncomputed, replayed)

    def _start_workers(self) -> None:
        policy, ranks, optimizer = self.policy, self._workers.ranks, self.optimizer
        layout, given = StateLayout.of(policy, optimizer), optimizer.tensors()
        with self._workers.running("load", self._run_config):
            pass
        with self._workers.running("receive_state", layout):
            broadcast_weights(policy, policy.reference, ranks)
            layout.broadcast_optimizer(optimizer, ranks, policy.device, given)
        self._has_started = True
