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
from openenv_pipe.learner.learner import Learner
from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.learner.policy import Policy
from openenv_pipe.learner.ranks import Ranks
from openenv_pipe.learner.sharding import ShardedOptimizer, ShardedPolicy
from openenv_pipe.learner.workers import Workers
from openenv_pipe.types import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What a learner goes on from beside the weights, in whole tensors."""

    reference: list[torch.Tensor] | None  # as Policy.reference has it
    optimizer: Mapping[str, torch.Tensor]
    num_steps_taken: int

    def spread(self, policy: Policy, ranks: Ranks) -> None:
        """To or from rank 0: its weights and tensors become those of all."""
        trained = [parameter.data for _, parameter in policy.trained_parameters()]
        for values in (*trained, *(self.reference or ()), *self.optimizer.values()):
            ranks.spread(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """What the others have to know to receive a state."""

    packs_rows: bool
    num_reference: int | None
    optimizer: Mapping[str, tuple[torch.Size, torch.dtype]]
    num_steps_taken: int

    @classmethod
    def of(cls, policy: Policy, state: State) -> "Beginning":
        return cls(
            packs_rows=policy.packs_rows,
            num_reference=None if state.reference is None else len(state.reference),
            optimizer={key: (t.shape, t.dtype) for key, t in state.optimizer.items()},
            num_steps_taken=state.num_steps_taken,
        )

    def receive(self, policy: Policy, ranks: Ranks) -> State:
        """The policy takes over rank 0's weights; the rest of its state is returned."""
        policy.packs_rows = self.packs_rows
        reference = None
        if self.num_reference is not None:
            trained = policy.trained_parameters()[: self.num_reference]
            reference = [torch.empty_like(values.data) for _, values in trained]
        optimizer = {
            key: torch.empty(shape, dtype=dtype, device=policy.device)
            for key, (shape, dtype) in self.optimizer.items()
        }
        state = State(
            reference=reference, optimizer=optimizer, num_steps_taken=self.num_steps_taken
        )
        state.spread(policy, ranks)
        return state


class JointLearner:
    """To the pipeline what a Learner is."""

    def __init__(self, policy: Policy, config: RunConfig, workers: Workers) -> None:
        self._policy = policy
        self._config = config
        self._workers = workers
        self._learner = _learner(policy, config, workers.ranks)
        self._has_begun = False

    @property
    def optimizer(self) -> "Optimizer | GatheredOptimizer":
        own = self._learner.optimizer
        if isinstance(own, ShardedOptimizer):
            return GatheredOptimizer(own, self._workers)
        return own

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """As Learner.update. The first one starts the workers."""
        if not self._has_begun:
            self._begin()
        with self._workers.doing("update", samples, step):
            metrics = self._learner.update(samples, step)
            publish_weights(self._learner, self._policy)
        return metrics

    def _begin(self) -> None:
        """Until now this was a learner of one device, new or from a checkpoint: all get that."""
        own, ranks = self._learner.optimizer, self._workers.ranks
        state = State(
            reference=self._policy.reference,
            optimizer=own.tensors(),
            num_steps_taken=own.num_steps_taken,
        )
        with self._workers.doing("load", self._config):
            pass
        with self._workers.doing("begin", Beginning.of(self._policy, state)):
            state.spread(self._policy, ranks)
            if self._config.trainer.parallel == "fsdp":
                twin = self._policy.twin(learns=True)
                self._learner = build_rank(twin, self._config, ranks, state)
        self._has_begun = True


class GatheredOptimizer:
    """A sharded optimizer as a checkpoint knows one: whole."""

    def __init__(self, own: ShardedOptimizer, workers: Workers) -> None:
        self._own = own
        self._workers = workers

    @property
    def num_steps_taken(self) -> int:
        return self._own.num_steps_taken

    def tensors(self) -> dict[str, torch.Tensor]:
        with self._workers.doing("gather_optimizer"):
            return self._own.tensors()


def build_learner(
    policy: Policy, config: RunConfig, workers: Workers | None
) -> Learner | JointLearner:
    """The learner of a run, on as many devices as there are workers for."""
    return JointLearner(policy, config, workers) if workers else _learner(policy, config, Ranks())


def build_rank(policy: Policy, config: RunConfig, ranks: Ranks, state: State) -> Learner:
    """One rank's learner, going on from `state`. The policy's model is the learner's alone."""
    trainer, optimizer = config.trainer, None
    if trainer.parallel == "fsdp":
        policy = ShardedPolicy(policy, ranks)
        num_steps = trainer.steps * trainer.updates_per_step
        optimizer = ShardedOptimizer(
            policy.trained_parameters(), trainer.optimizer, num_steps, ranks
        )
    learner = _learner(policy, config, ranks, optimizer)
    if state.reference is not None:
        policy.keep_reference(state.reference)
    if state.optimizer:
        learner.optimizer.load(state.optimizer, state.num_steps_taken)
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
