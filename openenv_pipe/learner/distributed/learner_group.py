"""A learner on several devices, as seen from rank 0, which is the run's own process.

The run's policy is whole in this process: it plays, is evaluated and saved as on one device. With
`parallel: data` it is also trained, as are its copies in the workers. With `parallel: fsdp` a
sharded copy is trained, and the whole policy gets its weights after each update.

Only GRPO is distributed: rank 0 does the warm start alone and then broadcasts its result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.learner.distributed.fsdp import ShardedOptimizer, ShardedPolicy
from openenv_pipe.learner.distributed.workers import Workers
from openenv_pipe.learner.learner import Learner
from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.learner.ranks import Ranks
from openenv_pipe.models.policy import Policy
from openenv_pipe.types import Sample, TrainedTokens


class PendingOptimizerState:
    """Optimizer state in CPU memory, held until the sharded optimizer that loads it is built."""

    def __init__(self) -> None:
        self.num_steps_taken = 0
        self._tensors: Mapping[str, torch.Tensor] = {}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def load(self, tensors: Mapping[str, torch.Tensor], num_steps_taken: int) -> None:
        self._tensors, self.num_steps_taken = tensors, num_steps_taken


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayout:
    """Shapes and dtypes that workers need before rank 0 broadcasts weights and optimizer state."""

    packs_rows: bool
    num_reference: int | None
    optimizer: Mapping[str, tuple[torch.Size, torch.dtype]]
    num_steps_taken: int

    @classmethod
    def of(cls, policy: Policy, optimizer: Optimizer | PendingOptimizerState) -> "StateLayout":
        return cls(
            packs_rows=policy.packs_rows,
            num_reference=None if policy.reference is None else len(policy.reference),
            optimizer={key: (t.shape, t.dtype) for key, t in optimizer.tensors().items()},
            num_steps_taken=optimizer.num_steps_taken,
        )

    def receive(self, policy: Policy, ranks: Ranks) -> list[torch.Tensor] | None:
        """Receive rank 0's weights into the policy; return the reference's, if there are any."""
        policy.packs_rows = self.packs_rows
        reference = None
        if self.num_reference is not None:
            trained = policy.trained_parameters()[: self.num_reference]
            reference = [torch.empty_like(values.data) for _, values in trained]
        broadcast_weights(policy, reference, ranks)
        return reference

    def broadcast_optimizer(
        self,
        target: Optimizer,
        ranks: Ranks,
        device: torch.device,
        given: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Load the state that rank 0 passes as `given` into `target`, on every rank.

        Tensors are sent one at a time, because all full tensors may not fit on a device.
        """
        parts = {}
        for key, (shape, dtype) in self.optimizer.items():
            whole = (
                given[key].to(device) if given else torch.empty(shape, dtype=dtype, device=device)
            )
            ranks.broadcast(whole)
            parts[key] = target.own_part(key, whole)
        target.load(parts, self.num_steps_taken)


def broadcast_weights(
    policy: Policy, reference: Sequence[torch.Tensor] | None, ranks: Ranks
) -> None:
    """Overwrite the weights and the reference of every rank with those of rank 0."""
    trained = [parameter.data for _, parameter in policy.trained_parameters()]
    for values in (*trained, *(reference or ())):
        ranks.broadcast(values)


class LearnerGroup:
    """Rank 0's learner together with the workers; has the interface of `Learner`."""

    def __init__(self, policy: Policy, config: RunConfig, workers: Workers) -> None:
        self._policy = policy
        self._config = config
        self._workers = workers
        self._learner = _learner(policy, config, workers.ranks)
        is_sharded = config.trainer.parallel == "fsdp"
        self._pending = PendingOptimizerState() if is_sharded else None  # until the workers run
        self._has_started = False

    @property
    def optimizer(self) -> Any:  # Optimizer, PendingOptimizerState or GatheredOptimizerState
        own = self._pending or self._learner.optimizer
        if isinstance(own, ShardedOptimizer):
            return GatheredOptimizerState(own, self._workers)
        return own

    @property
    def trained_tokens(self) -> list[TrainedTokens | None]:
        return self._learner.trained_tokens

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """Do what `Learner.update` does, on all ranks. The first call starts the workers."""
        if not self._has_started:
            self._start_workers()
        with self._workers.running("update", samples, step):
            metrics = self._learner.update(samples, step)
            publish_weights(self._learner, self._policy)
        return metrics

    def _start_workers(self) -> None:
        """Start the workers and send them the state of rank 0's learner."""
        policy, ranks = self._policy, self._workers.ranks
        layout, given = StateLayout.of(policy, self.optimizer), self.optimizer.tensors()
        with self._workers.running("load", self._config):
            pass
        with self._workers.running("receive_state", layout):
            broadcast_weights(policy, policy.reference, ranks)
            if self._pending:
                twin = policy.twin(learns=True)
                self._learner = build_rank(twin, self._config, ranks, policy.reference)
            optimizer = self._learner.optimizer
            layout.broadcast_optimizer(optimizer, ranks, policy.device, given)
        self._pending, self._has_started = None, True


class GatheredOptimizerState:
    """The full state of a sharded optimizer, as a checkpoint stores it."""

    def __init__(self, own: ShardedOptimizer, workers: Workers) -> None:
        self._own = own
        self._workers = workers

    @property
    def num_steps_taken(self) -> int:
        return self._own.num_steps_taken

    def tensors(self) -> dict[str, torch.Tensor]:
        with self._workers.running("gather_optimizer"):
            return self._own.tensors()


def build_learner(
    policy: Policy, config: RunConfig, workers: Workers | None
) -> Learner | LearnerGroup:
    """Build the learner of a run, on several devices if there are workers."""
    return LearnerGroup(policy, config, workers) if workers else _learner(policy, config, Ranks())


def build_rank(
    policy: Policy, config: RunConfig, ranks: Ranks, reference: list[torch.Tensor] | None
) -> Learner:
    """Build one rank's learner, which takes over the policy's model."""
    trainer, optimizer = config.trainer, None
    if trainer.parallel == "fsdp":
        policy = ShardedPolicy(policy, ranks)
        num_steps = trainer.steps * trainer.updates_per_step
        optimizer = ShardedOptimizer(
            policy.trained_parameters(), trainer.optimizer, num_steps, ranks
        )
    learner = _learner(policy, config, ranks, optimizer)
    if reference is not None:
        policy.keep_reference(reference)
    return learner


def publish_weights(learner: Learner, whole: Policy | None) -> None:
    """Copy sharded weights into the whole policy after an update; None: this rank has none."""
    if isinstance(learner.policy, ShardedPolicy):
        learner.policy.gather_into(whole)


def _learner(
    policy: Policy, config: RunConfig, ranks: Ranks, optimizer: Optimizer | None = None
) -> Learner:
    return Learner(
        policy,
        config.trainer,
        max_episode_tokens=config.env.max_episode_tokens,
        seed=config.seed,
        ranks=ranks,
        optimizer=optimizer,
    )
