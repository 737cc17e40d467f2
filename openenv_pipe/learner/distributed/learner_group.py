"""A learner on several devices: rank 0's, which is the run's own process.

The run's policy stays whole here: it plays, is evaluated and saved as on one device. With
`parallel: data` it also learns, as its copies in the workers do. With `parallel: fsdp` a second one
in shards learns, and the whole one gets its weights after each update.

Only GRPO is shared: the warm start is rank 0's alone, and what came of it goes to the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.learner.distributed.fsdp import ShardedOptimizer, ShardedPolicy
from openenv_pipe.learner.distributed.workers import Workers
from openenv_pipe.learner.learner import Learner
from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.learner.ranks import Ranks
from openenv_pipe.models.policy import Policy
from openenv_pipe.types import Sample


class PendingOptimizerState:
    """The state that an optimizer of shards will go on from, in the machine's memory until then."""

    def __init__(self) -> None:
        self.num_steps_taken = 0
        self._tensors: Mapping[str, torch.Tensor] = {}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def load(self, tensors: Mapping[str, torch.Tensor], num_steps_taken: int) -> None:
        self._tensors, self.num_steps_taken = tensors, num_steps_taken


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayout:
    """What the others have to know to receive what rank 0 goes on from."""

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
        """The policy takes over rank 0's weights; those of the reference are returned."""
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
        """The target goes on from what rank 0 has `given`. One tensor after another: all of them
        whole may be more than a device holds."""
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
    """To or from rank 0: the weights and the reference of all become its own."""
    trained = [parameter.data for _, parameter in policy.trained_parameters()]
    for values in (*trained, *(reference or ())):
        ranks.broadcast(values)


class LearnerGroup:
    """To the pipeline what a Learner is."""

    def __init__(self, policy: Policy, config: RunConfig, workers: Workers) -> None:
        self._policy = policy
        self._config = config
        self._workers = workers
        self._learner = _learner(policy, config, workers.ranks)
        is_sharded = config.trainer.parallel == "fsdp"
        self._pending = PendingOptimizerState() if is_sharded else None  # until there are shards
        self._has_started = False

    @property
    def optimizer(self) -> "Optimizer | PendingOptimizerState | GatheredOptimizerState":
        own = self._pending or self._learner.optimizer
        if isinstance(own, ShardedOptimizer):
            return GatheredOptimizerState(own, self._workers)
        return own

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """As Learner.update. The first one starts the workers."""
        if not self._has_started:
            self._start_workers()
        with self._workers.running("update", samples, step):
            metrics = self._learner.update(samples, step)
            publish_weights(self._learner, self._policy)
        return metrics

    def _start_workers(self) -> None:
        """Until now this was a learner of one device, new or from a checkpoint: all get that."""
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
    """A sharded optimizer as a checkpoint knows one: whole."""

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
    """The learner of a run, on as many devices as there are workers for."""
    return LearnerGroup(policy, config, workers) if workers else _learner(policy, config, Ranks())


def build_rank(
    policy: Policy, config: RunConfig, ranks: Ranks, reference: list[torch.Tensor] | None
) -> Learner:
    """One rank's learner. The policy's model is the learner's alone."""
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
    """After an update: shards become the weights of the whole policy, where there is one."""
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
