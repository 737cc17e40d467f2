"""What a cluster gives for a configuration, by roofline: the slower of arithmetic and memory.

The GPUs are divided between one learner, on a part of one machine or on several whole ones, and
vLLM servers of equal size on all others. All episodes have the greatest length that the
configuration allows.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from openenv_pipe.config.schema import RunConfig, VllmEngineConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.sizing.constants import Cluster, Gpu, constant
from openenv_pipe.models.flop_count import FlopCount, Size
from openenv_pipe.models.memory_estimate import (
    BYTES,
    Shape,
    is_checkpointed,
    memory_bytes,
    trained_bytes,
    weight_bytes,
)
from openenv_pipe.models.teacher import find_teacher_shapes

WEIGHTS_SHARE = 0.5  # of a server's memory at most, so that the other half caches episodes


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    seconds: float
    limit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Servers:
    num_servers: int
    gpus_each: int
    weight_bytes: int  # on each of their GPUs
    cached_tokens: int  # that fit into the cache of one server
    num_episodes: int  # that one server samples at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    config: RunConfig  # with devices, parallel and replicas of the plan in its trainer
    cluster: Cluster
    learner_nodes: int
    shape: Shape
    learner_bytes: Mapping[str, int]  # of each learner rank, by kind
    servers: Servers
    is_shared: bool  # learner and server take turns on one GPU
    rollout: Part
    update: Part
    publish: Part
    publish_bytes: int  # over the network, to all servers

    @property
    def fits(self) -> bool:
        return sum(self.learner_bytes.values()) <= self.cluster.gpu.memory_bytes

    @property
    def step_s(self) -> float:
        """Rollout and update take turns, or overlap with `max_staleness`."""
        both = (self.rollout.seconds, self.update.seconds)
        overlaps = self.config.trainer.max_staleness and not self.is_shared
        return (max(both) if overlaps else sum(both)) + self.publish.seconds

    @property
    def num_sampled(self) -> int:
        """Tokens that a step samples."""
        return self.config.trainer.episodes_per_step * reply_tokens(self.config)

    @property
    def num_sessions(self) -> int:
        """Sessions of the environment that the servers keep busy."""
        num_sampled = self.servers.num_servers * self.servers.num_episodes
        return min(num_sampled, self.config.trainer.episodes_per_step)

    @property
    def bottleneck(self) -> tuple[str, Part]:
        parts = {"rollout": self.rollout, "update": self.update, "publish": self.publish}
        name = max(parts, key=lambda each: parts[each].seconds)
        return name, parts[name]


def reply_tokens(config: RunConfig) -> int:
    """Return the tokens of an episode that the model writes, at most."""
    return min(config.env.max_turns * config.env.max_reply_tokens, config.max_episode_tokens)


def make_plan(config: RunConfig, shape: Shape, cluster: Cluster) -> Plan:
    """Return the fastest division of the GPUs whose learner fits, else that with the smallest one.

    Raises ConfigError: the engine is not vLLM, or a server of the model needs more GPUs than there
    are.
    """
    if not isinstance(config.engine, VllmEngineConfig):
        raise ConfigError(
            f"engine={config.engine.type}: a plan divides GPUs between the learner and vLLM "
            "servers; add engine=vllm"
        )
    plans = list(_plans(config, shape, cluster))
    given = config.cluster.num_learner_nodes
    if 1 < given >= cluster.num_nodes:
        raise ConfigError(
            f"cluster.learner_nodes={given}: a plan gives the learner whole machines, and servers "
            f"need others; cluster.nodes={cluster.num_nodes} are too few"
        )
    if not plans:
        needed = _gpus_of_server(config, shape, cluster)
        raise ConfigError(
            f"a server of this model needs {needed} of these GPUs, and the learner others; "
            f"{cluster.num_nodes} x {cluster.gpus_per_node} are too few"
        )
    fitting = [plan for plan in plans if plan.fits]
    if fitting:
        return min(fitting, key=lambda plan: plan.step_s)
    return min(plans, key=lambda plan: sum(plan.learner_bytes.values()))


def _plans(config: RunConfig, shape: Shape, cluster: Cluster) -> Iterator[Plan]:
    """Yield a plan for each division of the GPUs, with the policy whole and sharded.

    `cluster.learner_nodes` above 1 is kept; otherwise all numbers are tried.
    """
    gpus_each = _gpus_of_server(config, shape, cluster)
    if gpus_each > cluster.gpus_per_node:
        return
    if cluster.num_gpus == 1:
        yield _plan(config, shape, cluster, num_servers=1, gpus_each=1, learner_nodes=1)
        return
    for num_nodes, num_ranks in _learner_sizes(config, cluster):
        # A server's GPUs are of one machine; the learner's machines have fewer left.
        free = num_nodes * cluster.gpus_per_node - num_ranks
        num_servers = (cluster.num_nodes - num_nodes) * (cluster.gpus_per_node // gpus_each)
        num_servers += free // gpus_each
        if not num_servers:
            continue
        for parallel, num_replicas in _ways_to_divide(num_nodes, num_ranks):
            division = {"devices": num_ranks, "parallel": parallel, "replicas": num_replicas}
            trainer = config.trainer.model_copy(update=division)
            divided = config.model_copy(update={"trainer": trainer})
            yield _plan(
                divided,
                shape,
                cluster,
                num_servers=num_servers,
                gpus_each=gpus_each,
                learner_nodes=num_nodes,
            )


def _learner_sizes(config: RunConfig, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Yield numbers of nodes and of ranks: any part of one machine, or several whole ones."""
    given = config.cluster.num_learner_nodes
    if given == 1:
        for num_ranks in range(1, min(cluster.gpus_per_node, cluster.num_gpus - 1) + 1):
            yield 1, num_ranks
    for num_nodes in range(2, cluster.num_nodes):
        if given in (1, num_nodes):
            yield num_nodes, num_nodes * cluster.gpus_per_node


def _ways_to_divide(num_nodes: int, num_ranks: int) -> Iterator[tuple[str, int]]:
    """Yield trainer.parallel and trainer.replicas; a replica is all ranks, or one machine's."""
    yield "data", 1
    if num_ranks > 1:
        yield "fsdp", 1
    if num_ranks > num_nodes > 1:
        yield "fsdp", num_nodes


def _plan(
    config: RunConfig,
    shape: Shape,
    cluster: Cluster,
    *,
    num_servers: int,
    gpus_each: int,
    learner_nodes: int,
) -> Plan:
    flops = FlopCount.of_shape(shape, trains_all=config.model.lora.rank == 0)
    is_shared = cluster.num_gpus == 1
    servers = _servers(config, shape, cluster, num_servers, gpus_each, is_shared=is_shared)
    sent = trained_bytes(shape, config) if config.model.lora.rank else _served_bytes(config, shape)
    return Plan(
        config=config,
        cluster=cluster,
        learner_nodes=learner_nodes,
        shape=shape,
        learner_bytes=memory_bytes(
            shape, config, in_one_memory=False, teachers=find_teacher_shapes(config)
        ),
        servers=servers,
        is_shared=is_shared,
        rollout=_rollout(config, shape, flops, cluster.gpu, servers),
        update=_update(config, shape, flops, cluster.gpu, learner_nodes),
        publish=Part(seconds=sent / constant("publish"), limit="network"),
        publish_bytes=sent * num_servers,
    )


def _served_bytes(config: RunConfig, shape: Shape) -> int:
    assert isinstance(config.engine, VllmEngineConfig)
    return shape.num_parameters * BYTES[config.engine.served_precision(config.model.autocast)]


def _cache_bytes(config: RunConfig, shape: Shape) -> int:
    """Return the bytes that a server caches for a token."""
    assert isinstance(config.engine, VllmEngineConfig)
    width = BYTES[config.engine.served_precision(config.model.autocast)]
    return 2 * shape.cache_width * shape.num_layers * width


def _gpus_of_server(config: RunConfig, shape: Shape, cluster: Cluster) -> int:
    """Return the GPUs of a server, a power of two, as tensor parallelism divides heads."""
    room = WEIGHTS_SHARE * constant("server memory") * cluster.gpu.memory_bytes
    return 2 ** max(0, math.ceil(math.log2(_served_bytes(config, shape) / room)))


def _servers(
    config: RunConfig,
    shape: Shape,
    cluster: Cluster,
    num_servers: int,
    gpus_each: int,
    *,
    is_shared: bool,
) -> Servers:
    engine = config.engine
    assert isinstance(engine, VllmEngineConfig)
    share = engine.gpu_memory_share if is_shared else constant("server memory")
    room = share * cluster.gpu.memory_bytes * gpus_each - _served_bytes(config, shape)
    cached = max(0, int(room / _cache_bytes(config, shape)))
    of_each = math.ceil(config.trainer.episodes_per_step / num_servers)
    num_cached = cached // config.max_episode_tokens
    return Servers(
        num_servers=num_servers,
        gpus_each=gpus_each,
        weight_bytes=_served_bytes(config, shape) // gpus_each,
        cached_tokens=cached,
        num_episodes=max(1, min(engine.max_requests, num_cached, of_each)),
    )


def _rollout(config: RunConfig, shape: Shape, flops: FlopCount, gpu: Gpu, servers: Servers) -> Part:
    """Estimate decoding, a token for each episode at a time, and the prefill of the rest.

    An episode has half of its length in the cache on average. The environment takes no time.
    """
    at_once, total = servers.num_episodes, config.trainer.episodes_per_step
    context = config.max_episode_tokens // 2
    read = _served_bytes(config, shape) + at_once * context * _cache_bytes(config, shape)
    one = Size(
        num_tokens=at_once,
        num_contexts=at_once * context,
        num_finished=at_once,
        num_predicted=at_once,
    )
    gpus = servers.gpus_each
    seconds = {
        "memory bandwidth": read / (gpu.memory_bytes_per_s * constant("bandwidth") * gpus),
        "arithmetic": flops.forward(one) / (gpu.flops_per_s * constant("prefill") * gpus),
    }
    limit = max(seconds, key=lambda each: seconds[each])
    token_s = seconds[limit] + constant("overhead")
    if constant("overhead") > seconds[limit]:
        limit = "the server's overhead per token"
    rounds = total / (servers.num_servers * at_once)
    read_tokens = config.max_episode_tokens - reply_tokens(config)
    prompts = Size(
        num_tokens=read_tokens * total,
        num_contexts=read_tokens * context * total,
        num_finished=read_tokens * total,
        num_predicted=0,
    )
    prefill_rate = gpu.flops_per_s * constant("prefill") * gpus * servers.num_servers
    prefill_s = flops.forward(prompts) / prefill_rate
    decode_s = reply_tokens(config) * token_s * max(1.0, rounds)
    return Part(
        seconds=decode_s + prefill_s, limit=limit if decode_s >= prefill_s else "prefill of prompts"
    )


def _update(
    config: RunConfig, shape: Shape, flops: FlopCount, gpu: Gpu, learner_nodes: int
) -> Part:
    """Estimate the passes over all tokens, without shared prefixes, and their collectives.

    Each pass also computes the KL term's reference, if it is on the learner's GPUs.
    """
    trainer, tokens = config.trainer, config.max_episode_tokens
    total = trainer.episodes_per_step
    size = Size(
        num_tokens=total * tokens,
        num_contexts=total * tokens * (tokens + 1) // 2,
        num_finished=total * reply_tokens(config),
        num_predicted=total * reply_tokens(config),
    )
    work = flops.forward_and_backward(size)
    if is_checkpointed(config):
        work += flops.forward(size)
    if trainer.loss.kl.coef and trainer.loss.kl.reference is None:
        work += flops.forward(size)
    for teacher in find_teacher_shapes(config):
        work += FlopCount.of_shape(teacher, trains_all=False).forward(size)
    in_machine, between = _sent_bytes(config, shape, learner_nodes)
    seconds = {
        "arithmetic": work / (trainer.devices * gpu.flops_per_s * constant("mfu")),
        "collectives": in_machine / (gpu.link_bytes_per_s * constant("link")),
        "network between machines": between / (constant("network") * constant("link")),
    }
    limit = max(seconds, key=lambda each: seconds[each])
    return Part(seconds=trainer.passes_per_step * seconds[limit], limit=limit)


def _sent_bytes(config: RunConfig, shape: Shape, learner_nodes: int) -> tuple[float, float]:
    """Return the bytes that each rank receives, from its machine and from others.

    What a machine receives is divided over the network adapters of its ranks. With FSDP, each batch
    gathers the weights twice and reduces the gradients; whole policies reduce them once an update.
    """
    trainer, ranks = config.trainer, config.trainer.devices
    gradients, weights = trained_bytes(shape, config), weight_bytes(shape, config)
    per_node = ranks // learner_nodes
    other_nodes = (learner_nodes - 1) / learner_nodes  # the share of data that is elsewhere
    if trainer.parallel == "data":
        # To the owner of each part, and back, in each update.
        all_sums = 2 * gradients * trainer.updates_per_step
        return (ranks - 1) / ranks * all_sums, other_nodes * all_sums / per_node
    tokens = config.trainer.episodes_per_step * config.max_episode_tokens
    batches = math.ceil(tokens / ranks / trainer.tokens_per_batch)
    num_shards = ranks // trainer.replicas
    sharded = 2 * weights + gradients
    in_machine = batches * (num_shards - 1) / num_shards * sharded
    is_in_machine = trainer.replicas == learner_nodes
    between = 2 * gradients if is_in_machine else sharded
    return in_machine, batches * other_nodes * between / per_node
