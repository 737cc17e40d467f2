"""Turns running out of memory, wherever it happens, into an error with advice for that stage.

Nothing here imports torch: its errors are recognised by their type and text. The stage is that of
the innermost module of this package in the traceback that has one, in `STAGES` or, as modules of
extras do, in a constant of its own, `OUT_OF_MEMORY_STAGE`.
"""

import errno
import traceback
from pathlib import Path
from typing import cast

from openenv_pipe.errors import OutOfMemoryError

PACKAGE = Path(__file__).parents[1]
# How torch on CPUs and GPUs, its libraries, safetensors and C++ say it.
SIGNS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "alloc_failed",
    "bad_alloc",
)
SMALLER = "train an adapter (model.lora.rank=16), with model.quantization=nf4 if that is too much"
SAMPLING = (
    "sampling",
    "lower engine.max_batch (episodes that are sampled at once) or env.max_episode_tokens",
)
UPDATE = (
    "an update",
    f"lower trainer.tokens_per_batch, set model.activation_checkpointing=true, or {SMALLER}",
)
LOADING = (
    "loading the model",
    f"choose a smaller model, or {SMALLER}; an adapter also allows model.dtype=bfloat16",
)
PUBLISHING = (
    "publishing the weights",
    "train an adapter and publish it alone (model.lora.rank=16 engine.publish=adapter)",
)
CHECKING = ("checking the forward pass", LOADING[1])
OTHER = ("the run", "end other programs, or use a machine with more memory")
STAGES = {
    "engines/local": SAMPLING,
    "engines/episode_batch": SAMPLING,
    "engines/eager": SAMPLING,
    "engines/vllm": PUBLISHING,
    "learner": UPDATE,
    "models/forward/forward_check": CHECKING,
    "models/load": LOADING,
    "models/safetensors_only": LOADING,
    "models/weights": PUBLISHING,
    "pipeline/grpo_stage": UPDATE,
    "pipeline/loading": LOADING,
    "pipeline/warm_start_stage": UPDATE,
}


def as_out_of_memory(
    error: BaseException, stage: tuple[str, str] | None = None
) -> OutOfMemoryError | None:
    """Return the error to show if memory ran out, None if something else went wrong.

    stage: words and advice to use in place of those that follow from the traceback.
    """
    if isinstance(error, OutOfMemoryError):
        return error
    cause: BaseException | None = error
    while cause is not None and not _is_out_of_memory(cause):
        cause = cause.__cause__
    if cause is None:
        return None
    name, advice = stage or _stage(error)
    said = (str(cause) or type(cause).__name__).splitlines()[0]
    return OutOfMemoryError(f"out of memory in {name}: {said:.300}; {advice}")


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):  # also numpy's
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_native = isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError"
    return is_native and any(sign in str(error).lower() for sign in SIGNS)


def _stage(error: BaseException) -> tuple[str, str]:
    """Return the stage of the innermost frame that belongs to one, and its advice."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = Path(frame.f_code.co_filename)
        if not file.is_relative_to(PACKAGE):
            continue
        if own := frame.f_globals.get("OUT_OF_MEMORY_STAGE"):
            return cast("tuple[str, str]", own)
        module = file.relative_to(PACKAGE).with_suffix("").as_posix()
        while module not in STAGES and "/" in module:
            module = module.rpartition("/")[0]
        if module in STAGES:
            return STAGES[module]
    return OTHER
