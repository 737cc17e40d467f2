"""Keys of a Ray cluster that have no effect."""

from openenv_pipe.config.unused_keys import IneffectiveKeys

RULES = (
    IneffectiveKeys(
        keys=("cluster.cpus_per_rank",),
        because=("cluster.learner_nodes",),
        applies=lambda config: config.cluster.num_learner_nodes == 1,
        advice="set cluster.learner_nodes above 1",
    ),
    IneffectiveKeys(
        keys=("cluster.cpus_per_vllm_server", "cluster.gpus_per_vllm_server"),
        because=("cluster.vllm_on_nodes",),
        applies=lambda config: not config.cluster.serves_on_nodes,
        advice="set cluster.vllm_on_nodes=true",
    ),
)
