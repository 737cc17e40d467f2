"""A plan and its constants as tables."""

from openenv_pipe.extras.sizing.constants import CONSTANTS, GB
from openenv_pipe.extras.sizing.estimate import Part, Plan, reply_tokens
from openenv_pipe.system.tables import Column, Fit, Table

WISHES = {
    ("rollout", "memory bandwidth"): "more GPUs, or shorter episodes (env.max_episode_tokens)",
    ("rollout", "arithmetic"): "more GPUs",
    ("rollout", "prefill of prompts"): "more GPUs, or shorter observations",
    ("rollout", "the server's overhead per token"): "more episodes at once "
    "(trainer.tasks_per_step, engine.max_requests)",
    ("update", "arithmetic"): "more GPUs for the learner",
    ("update", "collectives"): "larger batches (trainer.tokens_per_batch), or model.lora.rank=16",
    ("update", "network between machines"): "larger batches (trainer.tokens_per_batch), fewer "
    "cluster.learner_nodes, or model.lora.rank=16",
    ("publish", "network"): "an adapter in place of all weights (model.lora.rank=16)",
}


def as_table(plan: Plan) -> Table:
    table = Table(Column("part"), Column("plan", fit=Fit.FOLD))
    for name, text in _rows(plan).items():
        table.add_row(name, text)
    return table


def _rows(plan: Plan) -> dict[str, str]:
    config, trainer, servers = plan.config, plan.config.trainer, plan.servers
    name, part = plan.bottleneck
    lora = config.model.lora.rank
    num_episodes, tokens = trainer.episodes_per_step, config.max_episode_tokens
    turns_per_s = num_episodes * config.env.max_turns / plan.rollout.seconds
    tensor_parallel = (
        f" ('engine.arguments=[\"--tensor-parallel-size={servers.gpus_each}\"]')"
        if servers.gpus_each > 1
        else ""
    )
    return {
        "model": f"{plan.shape.num_parameters / 1e9:.2f} billion parameters, "
        + (f"LoRA of rank {lora}" if lora else "full training"),
        "a step": f"{num_episodes} episodes of {tokens:,} tokens at most, of which "
        f"{reply_tokens(config):,} are sampled",
        "learner": _learner(plan),
        "learner's memory": _memory(plan),
        "servers": f"{servers.num_servers} of {servers.gpus_each} GPU"
        + ("s each" if servers.gpus_each > 1 else "")
        + tensor_parallel,
        "a server's memory": f"{servers.weight_bytes / GB:.1f} GB of weights on each GPU, and a "
        f"cache of {servers.cached_tokens:,} tokens: {servers.num_episodes} episodes at once",
        "rollout": _timed(plan.rollout, plan.num_sampled, "sampled"),
        "update": _timed(plan.update, num_episodes * tokens, "trained"),
        "publish": f"{plan.publish.seconds:.2f} s, {plan.publish_bytes / GB:.2f} GB over the "
        "network",
        "whole step": f"{plan.step_s:.1f} s, {plan.num_sampled / plan.step_s:,.0f} sampled "
        f"tokens/s (trainer.max_staleness={trainer.max_staleness})",
        "environment": f"{plan.num_sessions} sessions, {turns_per_s:,.0f} steps/s",
        "bottleneck": f"{name}, by {part.limit}: {WISHES[name, part.limit]}",
    }


def _learner(plan: Plan) -> str:
    trainer = plan.config.trainer
    if plan.is_shared:
        return "the same GPU as the server, in turns (engine.sleep)"
    if trainer.devices == 1:
        return "1 GPU"
    division = f"trainer.parallel={trainer.parallel}"
    if trainer.replicas > 1:
        division += f" trainer.replicas={trainer.replicas}"
    if plan.learner_nodes == 1:
        return f"{trainer.devices} GPUs of one machine, {division}"
    nodes = f"cluster=ray cluster.learner_nodes={plan.learner_nodes}"
    return f"{trainer.devices} GPUs of {plan.learner_nodes} machines, {nodes} {division}"


def _memory(plan: Plan) -> str:
    total, available = sum(plan.learner_bytes.values()), plan.cluster.gpu.memory_bytes
    largest = sorted(plan.learner_bytes, key=lambda kind: -plan.learner_bytes[kind])[:4]
    kinds = ", ".join(f"{kind} {plan.learner_bytes[kind] / GB:.1f}" for kind in largest)
    text = f"{total / GB:.1f} of {available / GB:.0f} GB on each GPU: {kinds}"
    if plan.fits:
        return text
    wishes = ["more GPUs"]
    if largest[0] == "activations":
        wishes = ["a lower trainer.tokens_per_batch"]
        if not plan.config.model.activation_checkpointing:
            wishes.insert(0, "model.activation_checkpointing=true")
    elif plan.config.model.lora.rank == 0:
        wishes.append("model.lora.rank=16 with model.dtype=bfloat16")
    return f"DOES NOT FIT: {text}; it needs {', or '.join(wishes)}"


def _timed(part: Part, num_tokens: int, what: str) -> str:
    rate = num_tokens / part.seconds
    return f"{part.seconds:.1f} s, {rate:,.0f} {what} tokens/s, limited by {part.limit}"


def constants_table(plan: Plan) -> Table:
    """Return what the plan rests on: the GPU's data sheet, and what share of it is reached."""
    table = Table(
        Column("constant", fit=Fit.FOLD),
        Column("value", justify="right"),
        Column("kind"),
        Column("source", fit=Fit.FOLD, drop=1),
        title="what the plan rests on",
    )
    gpu = plan.cluster.gpu
    table.add_row(
        "the GPU",
        f"{gpu.flops_per_s / 1e12:.0f} TFLOP/s, {gpu.memory_bytes_per_s / 1e12:.2f} TB/s",
        "data sheet",
        gpu.source,
    )
    table.add_row(
        "the learner's memory",
        "0.7 to 1.07 of the estimate",
        "measured",
        "one H200 and the shape of Qwen3-0.6B: benchmarks/results/gpu.md",
    )
    for each in CONSTANTS.values():
        table.add_row(each.what, f"{each.value:g} {each.unit}", each.kind, each.source)
    return table
