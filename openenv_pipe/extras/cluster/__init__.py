"""`cluster=ray`: parts of a run on the nodes of a Ray cluster."""

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
