"""Check by estimates, before anything is loaded, that memory and disk are enough for a run."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.config.schema import HubModelConfig, ModelConfig, RunConfig
from openenv_pipe.engines.vllm.server_memory import ServerMemory, servers_in_machine, servers_on_gpu
from openenv_pipe.models.hub import find_model_folder
from openenv_pipe.models.memory_estimate import (
    Shape,
    at_rest,
    disk_bytes,
    growth_on_cpu,
    memory_bytes,
    read_folder_shape,
    tiny_shape,
    while_learning,
)

TIGHT = 0.8  # of the available bytes; above this `check` warns, because estimates are not exact


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moment:
    """The memory that the learner holds in one phase of the run, and the memory available to it."""

    held: Mapping[str, int]  # bytes by kind
    room: int  # bytes
    servers_awake: bool  # whether vLLM servers hold a part of the same memory in this phase

    @property
    def total(self) -> int:
        return sum(self.held.values())


def find_shape(model: ModelConfig) -> Shape | None:
    """Return the shape of a model; None if it is not on this machine, or its keys are unusual.

    Raises ConfigError if its folder cannot be read.
    """
    if not isinstance(model, HubModelConfig):
        return tiny_shape(model)
    folder = find_model_folder(model)
    return None if folder is None else read_folder_shape(model, folder)


def memory_line(config: RunConfig, shape: Shape, teachers: Sequence[Shape] = ()) -> Line:
    """Return the check of memory, for the phase of the run with the least memory to spare."""
    place, available = _available_memory(config.device)
    needed = memory_bytes(shape, config, in_one_memory=place == "machine", teachers=teachers)
    if place == "machine":
        servers = servers_in_machine(config, shape)
    else:
        servers = servers_on_gpu(config, sum(needed.values()))
    moment = _scarcest(config, needed, available, servers)
    largest = max(moment.held, key=lambda kind: moment.held[kind])
    growth = growth_on_cpu(moment.held) if place == "machine" else 0
    later = f" (after many steps up to {_size(moment.total + growth)})" if growth else ""
    text = f"about {_size(moment.total)}{later} of {_size(moment.room)} on the {place}"
    text += f", mostly {largest}"
    if servers:
        text += f"; {_about(servers, moment, available)}"
    if max(moment.total / TIGHT, moment.total + growth) <= moment.room:
        return Line("memory", Result.OK, text)
    result = Result.WARN if moment.total <= moment.room else Result.FAIL
    return Line("memory", result, f"{text}; {_advice(config, place, moment)}")


def _scarcest(
    config: RunConfig, needed: Mapping[str, int], available: int, servers: ServerMemory | None
) -> _Moment:
    left = max(0, available - (servers.num_bytes if servers else 0))
    sleep = servers is not None and servers.sleep
    learning = _Moment(
        held=while_learning(needed, config),
        room=available if sleep else left,
        servers_awake=servers is not None and not sleep,
    )
    playing = _Moment(held=at_rest(needed), room=left, servers_awake=servers is not None)
    return max(learning, playing, key=lambda moment: moment.total / max(1, moment.room))


def _about(servers: ServerMemory, moment: _Moment, available: int) -> str:
    one = servers.num_servers == 1
    who = "the vLLM server" if one else f"{servers.num_servers} vLLM servers"
    if not moment.servers_awake:
        return f"{who} {'sleeps' if one else 'sleep'} meanwhile"
    when = "between updates " if servers.sleep else ""
    takes = f"{'takes' if one else 'take'} {_size(servers.num_bytes)}"
    return f"{when}{who} {takes} of the {_size(available)} there"


def _advice(config: RunConfig, place: str, moment: _Moment) -> str:
    """Name the keys whose change would reduce the memory of this phase."""
    lower, change = [], []
    if "activations" in moment.held:
        lower.append("trainer.tokens_per_batch")
        change.append("model.activation_checkpointing=true")
        if moment.servers_awake and place == "GPU":
            ahead = " with trainer.max_staleness=0" if config.trainer.max_staleness else ""
            change.append(f"engine.sleep=level1{ahead}")
    lower += config.engine.memory_keys(on_gpu=place == "GPU", servers_awake=moment.servers_awake)
    wishes = [f"lower {' or '.join(lower)}"] if lower else []
    wishes += [f"set {' or '.join(change)}"] if change else []
    return f"{', '.join(wishes)}, or use a smaller model"


def _available_memory(device: str) -> tuple[str, int]:
    if device != "cpu":
        import torch  # The import takes seconds, so it is done only if a GPU may be used.

        if torch.cuda.is_available():
            return "GPU", torch.cuda.mem_get_info()[0]
    try:
        table = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # This system is not Linux.
        return "machine", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (available,) = (line for line in table if line.startswith("MemAvailable"))
    return "machine", int(available.split()[1]) * 1024


def disk_line(config: RunConfig, shape: Shape) -> Line:
    needed = disk_bytes(shape, config)
    folder = Path(config.runs_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
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
