"""Decide whether servers sleep, which gives their GPU memory to the learner during an update.

At level 1 a sleeping server keeps its weights in the machine's memory. At level 2 it drops them,
because the next policy replaces all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.errors import ConfigError

LEVELS = {"never": 0, "level1": 1, "level2": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerFootprint:
    """What the learner uses of the GPUs that it may share with the vLLM servers."""

    on_gpu: bool
    free_gpus: Sequence[str] = ()  # GPUs that it does not use, as CUDA_VISIBLE_DEVICES names them
    gpu_bytes: int = 0  # memory of its GPU
    needs_bytes: int = 0  # estimate of the memory that an update takes of it; 0: unknown
    plays_ahead: bool = False  # servers sample during updates
    servers_elsewhere: bool = False  # they are on other machines

    @property
    def shares_gpu(self) -> bool:
        """Whether servers that the run starts are on the learner's GPU."""
        return self.on_gpu and not self.free_gpus and not self.servers_elsewhere


def sleep_level(config: VllmEngineConfig, footprint: LearnerFootprint, *, mode: str) -> int:
    """Return the level of sleep, 0 for servers that stay awake.

    Raises ConfigError: `engine.sleep` asks for sleep, which would free no memory for the learner.
    """
    shares_gpu = footprint.shares_gpu
    if config.sleep == "auto":
        if not config.starts_servers or not shares_gpu or footprint.plays_ahead:
            return 0
        served_bytes = config.num_servers * config.gpu_memory_share * footprint.gpu_bytes
        if footprint.needs_bytes + served_bytes <= footprint.gpu_bytes:
            return 0
        return 1 if mode == "adapter" else 2
    if config.sleep != "never" and not footprint.on_gpu:
        raise ConfigError(
            f"engine.sleep={config.sleep} needs a GPU that server and learner share, and this run "
            "learns on a CPU, where vLLM cannot sleep; set engine.sleep=auto or never"
        )
    if config.sleep != "never" and config.starts_servers and not shares_gpu:
        raise ConfigError(
            f"engine.sleep={config.sleep}: servers run on GPUs that the learner does not use, so "
            "sleep would free no memory for it; set engine.sleep=auto or never"
        )
    return LEVELS[config.sleep]
