"""The parts of a run that `cluster=ray` puts on other machines."""

from functools import partial
from pathlib import Path

import torch

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.engines.vllm.servers import MakeOnNodes
from openenv_pipe.extras.cluster.node_ranks import RayRanks
from openenv_pipe.extras.cluster.schema import RayClusterConfig
from openenv_pipe.extras.cluster.vllm_server import remote_servers
from openenv_pipe.extras.cluster.workers import RolloutWorkers
from openenv_pipe.learner.devices import NodeRanks
from openenv_pipe.pipeline.cluster import Cluster
from openenv_pipe.rollout.context import EpisodeLoop
from openenv_pipe.system.ray_connection import require_ray


class RayCluster(Cluster):
    """The nodes of a Ray cluster, besides this machine."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        assert isinstance(config.cluster, RayClusterConfig)
        self._settings = config.cluster

    def loop(self, logs: Path) -> EpisodeLoop:
        return RolloutWorkers(self.config, logs)

    def ranks(self, device: torch.device, logs: Path) -> NodeRanks | None:
        if self._settings.learner_nodes == 1:
            return None
        shared = logs.absolute() if self.config.trainer.is_sharded else None
        return RayRanks(self._settings, device, shared)

    def vllm_servers(self) -> MakeOnNodes | None:
        settings = self._settings
        return partial(remote_servers, settings) if settings.vllm_on_nodes else None


def check_ray(settings: RayClusterConfig) -> str:
    """Check that Ray is installed, and describe in a line what plays. Raises ConfigError."""
    require_ray()
    return f"{settings.rollout_workers} rollout workers, by Ray at {settings.address}"
