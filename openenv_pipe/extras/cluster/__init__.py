"""`cluster=ray`: parts of a run on the nodes of a Ray cluster.

schema          the keys
rules, unused   keys that do not go together, or have no effect
build           the parts of a run that are on nodes
workers         episodes on nodes, as the process with the engine sees them
remote_worker   one rollout worker, as that process sees it
worker          a rollout worker on its node
channel         the connection between the two
node_ranks      ranks of the learner on nodes, as rank 0 sees them
vllm_server     a vLLM server on a node: the run's side and the node's
nodes           processes that Ray places on nodes
trial           `openenv-pipe check`: what fits on the nodes, and whether it starts there
"""

from openenv_pipe.registry import BlockType, Extra

EXTRA = Extra(
    name="cluster",
    blocks=(
        BlockType(
            block="cluster",
            type="ray",
            config="openenv_pipe.extras.cluster.schema:RayClusterConfig",
            build="openenv_pipe.extras.cluster.build:RayCluster",
            check="openenv_pipe.extras.cluster.build:check_ray",
            trial="openenv_pipe.extras.cluster.trial:try_cluster",
        ),
    ),
    rules="openenv_pipe.extras.cluster.rules:RULES",
    unused="openenv_pipe.extras.cluster.unused:RULES",
)
