"""Build a run's policy and its learners, on one device or on several, also of other nodes."""

from pathlib import Path

import torch

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.learner.distributed.fsdp import ShardedPolicy
from openenv_pipe.learner.distributed.learner_group import LearnerGroup, build_rank
from openenv_pipe.learner.distributed.sharded_learner import ShardedLearner, ShardedWarmStart
from openenv_pipe.learner.distributed.sharded_load import load_sharded_policy
from openenv_pipe.learner.distributed.sharded_weights import ShardedPolicyWeights
from openenv_pipe.learner.distributed.workers import NodeRanks, Workers
from openenv_pipe.learner.learner import Learner
from openenv_pipe.learner.ranks import SINGLE_RANK
from openenv_pipe.learner.supervised import WarmStart
from openenv_pipe.models.forward.forward_check import check_forward
from openenv_pipe.models.load import load_policy
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.teacher import give_teacher
from openenv_pipe.models.weights import PolicyWeights


def build_workers(
    config: RunConfig,
    device: torch.device,
    logs: Path,
    num_threads: int,
    nodes: NodeRanks | None = None,
) -> Workers | None:
    """Build what starts the learner's other ranks; None if there is only one rank.

    nodes: starts those on other machines.
    """
    if config.trainer.devices == 1:
        return None
    return Workers(config.trainer.devices, device, logs, num_threads, nodes)


def load_checked_policy(
    config: RunConfig, device: torch.device, workers: Workers | None, checkpoint: Path | None
) -> tuple[Policy, str | None]:
    """Load the policy and check its forward pass.

    Returns the policy and why its samples are padded instead of packed; None if they are packed.

    Raises:
        ConfigError: the model cannot be read, trained or sharded.
    """
    max_tokens = config.max_episode_tokens
    if workers and config.trainer.is_sharded:
        policy = load_sharded_policy(
            config.model,
            seed=config.seed,
            device=device,
            ranks=workers.ranks,
            num_replicas=config.trainer.replicas,
            checkpoint=checkpoint,
            max_tokens=max_tokens,
        )
        return policy, policy.check_forward(max_tokens)
    whole = load_policy(
        config.model,
        seed=config.seed,
        device=device,
        checkpoint=checkpoint,
        max_tokens=max_tokens,
    )
    return whole, check_forward(whole, max_tokens)


def build_learner(
    policy: Policy, config: RunConfig, workers: Workers | None
) -> Learner | LearnerGroup:
    """Build the learner of a run, on several devices if there are workers.

    Raises:
        ConfigError: the teacher cannot be read, or none of its forward passes is right.
    """
    if workers and isinstance(policy, ShardedPolicy):
        with workers.ranks.joined("build_learner", config):
            return ShardedLearner(policy, config, workers.ranks)
    if workers:
        return LearnerGroup(policy, config, workers)
    give_teacher(policy, config)
    return build_rank(policy, config, SINGLE_RANK)


def build_warm_start(policy: Policy, config: RunConfig, workers: Workers | None) -> WarmStart:
    """Build the warm start. Unless the policy is sharded, only this process does it."""
    if workers and isinstance(policy, ShardedPolicy):
        with workers.ranks.joined("build_warm_start", config):
            return ShardedWarmStart(policy, config, workers.ranks)
    return WarmStart(
        policy,
        config.trainer.warm_start,
        tokens_per_batch=config.trainer.tokens_per_batch,
        seed=config.seed,
    )


def build_policy_weights(policy: Policy, workers: Workers | None) -> PolicyWeights:
    """Build what gives the policy to vLLM servers."""
    if workers and isinstance(policy, ShardedPolicy):
        return ShardedPolicyWeights(policy, workers.ranks)
    return PolicyWeights(policy)
