"""The GPUs of a plan, and the words of the command that describe them."""

from collections.abc import Sequence
from dataclasses import dataclass

from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.sizing.constants import GPUS, Gpu

NODES, GPUS_PER_NODE, GPU = "cluster.nodes", "cluster.gpus_per_node", "gpu"
DEFAULTS = {NODES: "1", GPUS_PER_NODE: "8", GPU: "h100"}
HIGHEST = {NODES: 1000, GPUS_PER_NODE: 16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Machines of equal GPUs."""

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
