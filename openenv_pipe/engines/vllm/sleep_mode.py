"""Whether a server gives its memory to the learner between two publishes: only where it has to.

Asleep it keeps none of its GPU's memory: at level 1 its weights wait in the machine's, at level 2
they are dropped, and the next policy brings all of them. Refused: sleep where nothing is gained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.errors import ConfigError

LEVELS = {"never": 0, "level1": 1, "level2": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerFootprint:
    """The learner, as far as servers on the same machine have to mind it."""

    on_gpu: bool
    free_gpus: Sequence[str] = ()  # that it leaves alone, as CUDA_VISIBLE_DEVICES names them
    gpu_bytes: int = 0  # of memory its GPU has
    needs_bytes: int = 0  # of them while it learns, estimated; 0: nobody knows
    plays_ahead: bool = False  # servers have to sample while it learns


def sleep_level(config: VllmEngineConfig, footprint: LearnerFootprint, *, way: str) -> int:
    """0: it stays awake. Raises ConfigError where sleep was asked for and would gain nothing."""
    shares_gpu = footprint.on_gpu and not footprint.free_gpus
    if config.sleep == "auto":
        if config.launch == "attach" or not shares_gpu or footprint.plays_ahead:
            return 0
        served_bytes = config.num_servers * config.gpu_memory_share * footprint.gpu_bytes
        if footprint.needs_bytes + served_bytes <= footprint.gpu_bytes:
            return 0
        return 1 if way == "adapter" else 2
    if config.sleep != "never" and not footprint.on_gpu:
        raise ConfigError(
            f"engine.sleep={config.sleep} needs a GPU that server and learner share, and this run "
            "learns on a CPU, where vLLM cannot sleep; set engine.sleep=auto or never"
        )
    if config.sleep != "never" and config.launch != "attach" and not shares_gpu:
        raise ConfigError(
            f"engine.sleep={config.sleep}: servers get GPUs that the learner leaves alone, so "
            "there is no memory to give to it; set engine.sleep=auto or never"
        )
    return LEVELS[config.sleep]
