"""Rules between the keys of a Ray cluster and others."""

from typing import TYPE_CHECKING

from openenv_pipe.config.rules.engine import sends_weights, sleeps, vllm_engine
from openenv_pipe.config.rules.rule import Rule

if TYPE_CHECKING:
    from openenv_pipe.config.schema.run import RunConfig


def _starts_no_server(config: "RunConfig") -> bool:
    engine = vllm_engine(config)
    starts_servers = engine is not None and engine.launch == "managed"
    return config.cluster.serves_on_nodes and not starts_servers


RULES = (
    Rule(
        keys=("cluster", "agent"),
        breaks=lambda c: c.cluster.plays_on_nodes and not c.agent.is_loop,
        advice="rollout workers play by the pipeline's own loop; set agent=loop or cluster=local",
        when="play",
    ),
    Rule(
        keys=("cluster", "host"),
        breaks=lambda c: c.cluster.plays_on_nodes and not c.host.runs_on_nodes,
        advice="each rollout worker starts environment servers as processes on its node; set "
        "host=process, or cluster=local",
        when="play",
    ),
    Rule(
        keys=("cluster", "host.port"),
        breaks=lambda c: c.cluster.plays_on_nodes and len(c.host.fixed_ports) > 0,
        advice="several rollout workers may be on one node; set host.port=null",
        when="play",
    ),
    Rule(
        keys=("cluster.vllm_on_nodes", "engine"),
        breaks=_starts_no_server,
        advice="only servers of engine=vllm engine.launch=managed are started on nodes; set "
        "these, or cluster.vllm_on_nodes=false",
    ),
    Rule(
        keys=("cluster.vllm_on_nodes", "engine.weight_transfer"),
        breaks=lambda c: c.cluster.serves_on_nodes and sends_weights(c, "ipc") is not None,
        advice="ipc reaches only a server on the learner's GPU; set "
        "engine.weight_transfer=broadcast or files",
    ),
    Rule(
        keys=("cluster.vllm_on_nodes", "engine.sleep"),
        breaks=lambda c: c.cluster.serves_on_nodes and sleeps(c) is not None,
        advice="the servers are not on the learner's GPU, so sleep would free no memory for it; "
        "set engine.sleep=auto or never",
    ),
    Rule(
        keys=("cluster.learner_nodes", "trainer.devices"),
        breaks=lambda c: c.trainer.devices % c.cluster.num_learner_nodes > 0,
        advice="each node has the same number of devices; set trainer.devices to a multiple of "
        "{cluster.learner_nodes}",
    ),
)
