"""The cluster and the constants of a plan: GPUs by data sheet, and what share of that is reached.

No step with vLLM servers has been measured on a GPU yet. Shares that others have published are
marked `published`, and those without a measurement `assumed`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from openenv_pipe.errors import ConfigError

GB = 10**9
NODES, GPUS_PER_NODE, GPU = "cluster.nodes", "cluster.gpus_per_node", "gpu"
DEFAULTS = {NODES: "1", GPUS_PER_NODE: "8", GPU: "h100"}
HIGHEST = {NODES: 1000, GPUS_PER_NODE: 16}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet: bytes, dense FLOP/s in bfloat16, and bytes per second."""

    memory_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float  # to another GPU of the same machine, in one direction
    source: str


GPUS = {
    "a100": Gpu(80 * GB, 312e12, 2.039e12, 300e9, "NVIDIA A100 data sheet, SXM 80 GB"),
    "h100": Gpu(80 * GB, 989e12, 3.35e12, 450e9, "NVIDIA H100 data sheet, SXM"),
    "h200": Gpu(141 * GB, 989e12, 4.8e12, 450e9, "NVIDIA H200 data sheet, SXM"),
    "b200": Gpu(180 * GB, 2250e12, 8e12, 900e9, "NVIDIA HGX B200 data sheet"),
    "l40s": Gpu(48 * GB, 362e12, 0.864e12, 32e9, "NVIDIA L40S data sheet; PCIe 4.0"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A number that a plan rests on, and where it is from."""

    value: float
    unit: str
    kind: Literal["published", "assumed"]
    what: str
    source: str


CONSTANTS = {
    "mfu": Constant(
        value=0.22,
        unit="of peak FLOP/s",
        kind="published",
        what="the learner's model FLOPs utilisation",
        source="prime-rl benchmarks/baselines, 4B LoRA at 16k tokens: 21.7 % on one H100, 22.8 % "
        "on 8 H200",
    ),
    "prefill": Constant(
        value=0.4,
        unit="of peak FLOP/s",
        kind="assumed",
        what="a server's prefill",
        source="large matrix products; measure with vllm bench",
    ),
    "bandwidth": Constant(
        value=0.7,
        unit="of peak memory bandwidth",
        kind="assumed",
        what="a server's decoding",
        source="reads of weights and caches; measure with vllm bench",
    ),
    "overhead": Constant(
        value=0.004,
        unit="s per decoded token",
        kind="assumed",
        what="scheduler and sampler of a server, for all its episodes together",
        source="decides for small models; measure with vllm bench",
    ),
    "link": Constant(
        value=0.7,
        unit="of the link's bandwidth",
        kind="assumed",
        what="collectives between learner ranks",
        source="measure with nccl-tests",
    ),
    "network": Constant(
        value=50e9,
        unit="bytes/s for each GPU",
        kind="assumed",
        what="the network between the learner's machines, before the share of collectives",
        source="400 Gbit/s for each GPU, as in NVIDIA DGX H100; measure with nccl-tests",
    ),
    "publish": Constant(
        value=8.25e9,
        unit="bytes/s",
        kind="published",
        what="new weights from the learner to all servers",
        source="verl: a model of 30B to 30 receivers by NCCL in 7 s",
    ),
    "server memory": Constant(
        value=0.9,
        unit="of a GPU's memory",
        kind="assumed",
        what="a server on a GPU of its own, weights and cache of keys and values",
        source="vLLM's default of --gpu-memory-utilization",
    ),
}


def constant(name: str) -> float:
    return CONSTANTS[name].value


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    gpu: Gpu
    num_nodes: int
    gpus_per_node: int

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node


def split_cluster(words: Sequence[str]) -> tuple[Cluster, list[str]]:
    """Return the cluster that some of the words describe, and the others: overrides of a run.

    Raises ConfigError: a number is out of its bounds, or the kind of GPU is not known.
    """
    given = dict(DEFAULTS)
    overrides = []
    for word in words:
        key, _, value = word.partition("=")
        if key in given:
            given[key] = value
        else:
            overrides.append(word)
    if given[GPU] not in GPUS:
        raise ConfigError(f"{GPU}={given[GPU]}: expected one of {', '.join(GPUS)}")
    numbers = {key: _number(key, given[key]) for key in HIGHEST}
    cluster = Cluster(
        gpu=GPUS[given[GPU]], num_nodes=numbers[NODES], gpus_per_node=numbers[GPUS_PER_NODE]
    )
    return cluster, overrides


def _number(key: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and 1 <= int(value[:9]) <= HIGHEST[key]):
        raise ConfigError(f"{key}={value}: expected a whole number from 1 to {HIGHEST[key]}")
    return int(value)
