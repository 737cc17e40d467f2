"""The precision in which a machine computes matrix products fast, bfloat16 if it has instructions
for it, else float32, and what that decides.

A processor without them computes bfloat16 in loops: one with AVX2 alone was measured to reach 1.2
GFLOP/s in bfloat16 and 79 in float32 (torch 2.13, one thread, 2048 x 576 x 1536).
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `compose` reads this module, and the schema's rules read `compose`'s.
    from openenv_pipe.config.schema import RunConfig
    from openenv_pipe.config.schema.engine_base import PublishMode

CPU_INFO = Path("/proc/cpuinfo")
# Instructions of x86 for bfloat16, by their names in Linux.
INSTRUCTIONS = {"amx_bf16", "avx512_bf16"}
# The device files that the drivers of NVIDIA and AMD create.
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def fast_precision(device: str) -> str:
    """The value of `${fast_precision:${device}}` in `conf/`."""
    return "bfloat16" if _uses_gpu(device) or _has_instructions() else "float32"


def warn_of_precision(config: "RunConfig") -> str | None:
    """Return that matrix products are slow in the run's precision; None if they are not.

    A slow precision is from a key that somebody set, or from a run of another machine.
    """
    if config.model.autocast == "float32" or fast_precision(config.device) == "bfloat16":
        return None
    return (
        "model.autocast=bfloat16: this processor has no instructions for it, and is many times as "
        "fast in float32; set model.autocast=float32, or leave the key out"
    )


def publish_mode(config: "RunConfig") -> "PublishMode | None":
    """Return what the run's servers receive of a new policy on this machine; None: it has none."""
    model = config.model
    on_gpu = _uses_gpu(config.device)
    return config.engine.publish_mode(
        model.lora.rank, dtype=model.dtype, precision=model.autocast, on_gpu=on_gpu
    )


def _uses_gpu(device: str) -> bool:
    # Without torch, which takes seconds to import.
    return device == "cuda" or (device == "auto" and any(each.exists() for each in GPU_DEVICES))


@cache
def _has_instructions() -> bool:
    try:
        text = CPU_INFO.read_text()
    except OSError:  # not Linux
        return False
    return any(
        not INSTRUCTIONS.isdisjoint(line.split())
        for line in text.splitlines()
        if line.startswith("flags")
    )
