"""Whether a run's memory and disk are here, before anything is loaded. By estimates."""

import os
import shutil
from pathlib import Path

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.findings import Line, Result
from openenv_pipe.footprint import Shape, disk_bytes, memory_bytes

TIGHT = 0.8  # of what is available: estimates are not exact


def memory_line(config: RunConfig, shape: Shape) -> Line:
    place, available = _available_memory(config.device)
    needed = memory_bytes(shape, config, in_one_memory=place == "machine")
    total = sum(needed.values())
    largest = max(needed, key=lambda kind: needed[kind])
    text = f"about {_size(total)} of {_size(available)} on the {place}, mostly {largest}"
    if total <= TIGHT * available:
        return Line("memory", Result.OK, text)
    advice = (
        "; lower trainer.tokens_per_batch or engine.max_batch, set "
        "model.activation_checkpointing=true, or use a smaller model"
    )
    return Line("memory", Result.WARN if total <= available else Result.FAIL, text + advice)


def _available_memory(device: str) -> tuple[str, int]:
    if device != "cpu":
        import torch  # takes seconds, so only where a GPU may be meant

        if torch.cuda.is_available():
            return "GPU", torch.cuda.mem_get_info()[0]
        if device == "cuda":
            raise ConfigError("device=cuda, but torch sees no GPU here; set device=auto or cpu")
    try:
        table = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return "machine", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (available,) = (line for line in table if line.startswith("MemAvailable"))
    return "machine", int(available.split()[1]) * 1024


def disk_line(config: RunConfig, shape: Shape) -> Line:
    needed = disk_bytes(shape, config)
    folder = Path(config.runs_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ConfigError(f"runs_dir={config.runs_dir!r}: {existing} cannot be written to")
    free = shutil.disk_usage(existing).free
    text = f"up to {_size(needed)} of {_size(free)} free in {config.runs_dir}"
    if needed <= TIGHT * free:
        return Line("disk", Result.OK, text)
    return Line("disk", Result.WARN, f"{text}; lower trainer.checkpoint.keep_last or set runs_dir")


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit in ("B", "KiB") else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
