"""Print the tables of docs/scaling.md, from the same estimate as `openenv-pipe plan`.

python benchmarks/scaling.py
"""

from collections.abc import Iterator, Sequence

from openenv_pipe.config.compose import compose
from openenv_pipe.extras.sizing.constants import CONSTANTS, GPUS, Cluster
from openenv_pipe.extras.sizing.estimate import make_plan
from openenv_pipe.extras.sizing.shapes import shape_of
from openenv_pipe.system.markdown import table

GB = 10**9
WORKLOAD = (
    *("conf=wordle_qwen3", "engine=vllm", "device=cuda", "model.activation_checkpointing=true"),
    *("trainer.tasks_per_step=64", "trainer.group_size=16", "trainer.max_staleness=1"),
    "trainer.tokens_per_batch=8192",
    *("env.max_turns=8", "env.max_reply_tokens=512", "env.max_episode_tokens=8192"),
)
FULL = ("model.lora.rank=0", "model.dtype=float32")
MODELS = {
    "1.7B": "Qwen/Qwen3-1.7B",
    "8B": "Qwen/Qwen3-8B",
    "32B": "Qwen/Qwen3-32B",
    "70B": "meta-llama/Llama-3.3-70B-Instruct",
}
TITLES = (
    *("model", "GPUs", "learner", "its memory, GB each", "servers", "sessions"),
    *("sampled tokens/s", "trained tokens/s", "published, GB", "step, s", "bottleneck"),
)


def result_rows() -> Iterator[Sequence[str]]:
    """Yield what each number of H100 GPUs gives for each model."""
    for name, path in MODELS.items():
        for kind, overrides in (("LoRA", ()), ("full", FULL)):
            for num_nodes in (1, 2, 8):
                config = compose([*WORKLOAD, f"model.path={path}", *overrides]).config
                cluster = Cluster(gpu=GPUS["h100"], num_nodes=num_nodes, gpus_per_node=8)
                yield _row(f"{name}, {kind}", config, cluster)


def _row(name, config, cluster) -> Sequence[str]:
    plan = make_plan(config, shape_of(config.model), cluster)
    trainer, servers = plan.config.trainer, plan.servers
    num_trained = trainer.tasks_per_step * trainer.group_size * config.env.max_episode_tokens
    needed = sum(plan.learner_bytes.values()) / GB
    part, limit = plan.bottleneck
    division = f"{trainer.devices}"
    if plan.learner_nodes > 1:
        division += f" on {plan.learner_nodes} machines"
    if trainer.replicas > 1:
        division += f", {trainer.replicas} replicas"
    of_learner = [division, f"{needed:.0f}" + ("" if plan.fits else ": too much")]
    if not plan.fits:
        return [name, str(cluster.num_gpus), *of_learner, *[""] * 6, "the learner's memory"]
    return [
        name,
        str(cluster.num_gpus),
        *of_learner,
        f"{servers.num_servers} of {servers.gpus_each}",
        str(plan.num_sessions),
        f"{plan.num_sampled / plan.rollout.seconds:,.0f}",
        f"{num_trained / plan.update.seconds:,.0f}",
        f"{plan.publish_bytes / GB:.1f}",
        f"{plan.step_s:.0f}",
        f"{part}: {limit.limit}",
    ]


def constant_rows() -> Iterator[Sequence[str]]:
    """Yield the constants that are not of a data sheet."""
    for each in CONSTANTS.values():
        yield [each.what, f"{each.value:g} {each.unit}", each.kind, each.source]


def gpu_rows() -> Iterator[Sequence[str]]:
    for name, gpu in GPUS.items():
        yield [
            f"`{name}`",
            f"{gpu.memory_bytes / GB:.0f}",
            f"{gpu.flops_per_s / 1e12:.0f}",
            f"{gpu.memory_bytes_per_s / 1e12:.2f}",
            f"{gpu.link_bytes_per_s / GB:.0f}",
            gpu.source,
        ]


def pages() -> Iterator[str]:
    """Yield each table of the page as Markdown."""
    yield table(list(TITLES), [list(row) for row in result_rows()])
    yield table(["constant", "value", "kind", "source"], [list(row) for row in constant_rows()])
    yield table(
        ["GPU", "memory, GB", "TFLOP/s in bfloat16", "memory, TB/s", "link, GB/s", "source"],
        [list(row) for row in gpu_rows()],
    )


if __name__ == "__main__":
    print("\n\n".join(pages()))
