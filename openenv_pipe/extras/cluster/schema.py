"""The keys of `cluster=ray`."""

from typing import ClassVar, Literal

from pydantic import Field

from openenv_pipe.config.schema.base import NumCores, NumProcesses, NumRetries, Seconds
from openenv_pipe.config.schema.cluster import ClusterBlock, RayAddress


class RayClusterConfig(ClusterBlock):
    """Rollout workers on the nodes of a Ray cluster play the episodes (conf/cluster/ray.yaml).

    Each starts `host.num_servers` environment servers on its own node. The rewards and the
    learner's first rank stay on the machine where the run is started.
    """

    type: Literal["ray"]
    plays_on_nodes: ClassVar[bool] = True
    address: RayAddress = Field(
        description="host:port of the cluster's head; auto: RAY_ADDRESS, else the cluster to which "
        "this machine belongs"
    )
    rollout_workers: NumProcesses = Field(
        description="processes that play episodes, spread over the nodes"
    )
    cpus_per_worker: NumCores = Field(
        description="cores that Ray reserves for each worker and its environment servers"
    )
    learner_nodes: NumProcesses = Field(
        description="nodes over which trainer.devices are divided, including the machine where the "
        "run is started; 1: all are on this machine"
    )
    cpus_per_rank: NumCores = Field(
        description="cores that Ray reserves for each of the learner's processes on other nodes"
    )
    vllm_on_nodes: bool = Field(
        description="whether the engine.num_servers vLLM servers of engine.launch=managed are "
        "started on other nodes, spread over them; false: on the machine where the run is started"
    )
    cpus_per_vllm_server: NumCores = Field(
        description="cores that Ray reserves for each of these servers"
    )
    gpus_per_vllm_server: NumProcesses = Field(
        description="GPUs that Ray gives each of these servers, if the learner is on a GPU; above "
        '1, engine.arguments divide the model, as ["--tensor-parallel-size=2"]'
    )
    start_timeout_s: Seconds = Field(
        description="how long a worker, a vLLM server or the learner waits for nodes with free "
        "resources, which an autoscaler may have to add"
    )
    max_restarts: NumRetries = Field(
        description="how many workers may be lost and replaced before the run fails, with their "
        "episodes played again; and how often a run that lost one of the learner's processes goes "
        "on from its last checkpoint"
    )

    @property
    def num_learner_nodes(self) -> int:
        return self.learner_nodes

    @property
    def serves_on_nodes(self) -> bool:
        return self.vllm_on_nodes

    @property
    def num_restarts(self) -> int:
        return self.max_restarts
