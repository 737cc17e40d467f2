"""Several devices of a run, each with a copy of the policy or a shard of it."""

from pathlib import Path

import torch

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.extras.devices.fsdp import ShardedPolicy
from openenv_pipe.extras.devices.learner_group import LearnerGroup, ShardedLearner, ShardedWarmStart
from openenv_pipe.extras.devices.sharded_load import check_shardable, load_sharded_policy
from openenv_pipe.extras.devices.sharded_weights import ShardedPolicyWeights
from openenv_pipe.extras.devices.workers import Workers
from openenv_pipe.learner.devices import Devices, NodeRanks
from openenv_pipe.learner.learner import Learner
from openenv_pipe.learner.supervised import WarmStart
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.weights import PolicyWeights
from openenv_pipe.system.out_of_memory import LOADING

OUT_OF_MEMORY_STAGE = LOADING


class SeveralDevices(Devices):
    """The device of this process, which is rank 0, and those of its workers."""

    def __init__(self, config: RunConfig, device: torch.device, workers: Workers) -> None:
        super().__init__(config, device)
        self._workers = workers

    @classmethod
    def build(
        cls,
        config: RunConfig,
        device: torch.device,
        logs: Path,
        num_threads: int,
        nodes: NodeRanks | None,
    ) -> "SeveralDevices":
        workers = Workers(config.trainer.devices, device, logs, num_threads, nodes)
        return cls(config, device, workers)

    @staticmethod
    def check(config: RunConfig) -> str:
        """Return a line about the policy's shards; empty if it is whole. Raises ConfigError."""
        trainer = config.trainer
        if not trainer.is_sharded:
            return ""
        check_shardable(config.model)
        num_shards = trainer.devices // trainer.replicas
        return f"each of {trainer.devices} devices holds one of {num_shards} shards of all weights"

    def load_policy(self, checkpoint: Path | None) -> tuple[Policy, str | None]:
        config = self._config
        if not config.trainer.is_sharded:
            return super().load_policy(checkpoint)
        policy = load_sharded_policy(
            config.model,
            seed=config.seed,
            device=self._device,
            ranks=self._workers.ranks,
            num_replicas=config.trainer.replicas,
            checkpoint=checkpoint,
            max_tokens=config.max_episode_tokens,
        )
        return policy, policy.check_forward(config.max_episode_tokens)

    def learner(self, policy: Policy) -> Learner:
        if not isinstance(policy, ShardedPolicy):
            return LearnerGroup(policy, self._config, self._workers)
        with self._workers.ranks.joined("build_learner", self._config):
            return ShardedLearner(policy, self._config, self._workers.ranks)

    def warm_start(self, policy: Policy) -> WarmStart:
        if not isinstance(policy, ShardedPolicy):
            return super().warm_start(policy)
        with self._workers.ranks.joined("build_warm_start", self._config):
            return ShardedWarmStart(policy, self._config, self._workers.ranks)

    def weights(self, policy: Policy) -> PolicyWeights:
        if not isinstance(policy, ShardedPolicy):
            return super().weights(policy)
        return ShardedPolicyWeights(policy, self._workers.ranks)

    def time_sum(self, num_bytes: int) -> float:
        return self._workers.try_collective(num_bytes)

    def close(self) -> None:
        self._workers.close()
