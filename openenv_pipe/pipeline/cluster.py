"""The machines that the parts of a run work on: this one, or also others."""

from pathlib import Path

import torch

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.engines.vllm.servers import MakeOnNodes
from openenv_pipe.learner.devices import NodeRanks
from openenv_pipe.registry import block_types, load
from openenv_pipe.rollout.context import EpisodeLoop


class Cluster:
    """The machines of a run: this one alone.

    The `build` of a cluster's type is called with the run's configuration, and returns a `Cluster`.
    Methods of subclasses return parts on other machines, or None for parts on this one.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def loop(self, logs: Path) -> EpisodeLoop | None:
        """Return what plays episodes on other machines. logs: the folder for log files."""
        return None

    def ranks(self, device: torch.device, logs: Path) -> NodeRanks | None:
        """Return what starts the learner's ranks on other machines. device: of all ranks."""
        return None

    def vllm_servers(self) -> MakeOnNodes | None:
        """Return what makes the vLLM servers on other machines."""
        return None


def build_cluster(config: RunConfig) -> Cluster:
    """Build what `cluster.type` names. Nothing is started."""
    cluster: Cluster = load(block_types("cluster")[config.cluster.type].build)(config)
    return cluster
