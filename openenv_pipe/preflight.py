"""`openenv-pipe check`: tries what a run needs, says what it found, and leaves nothing behind.

Each check yields lines; an error meant for people becomes a failed line, and the next check goes
on. Nothing is loaded onto a GPU, nothing is downloaded.
"""

import asyncio
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from openenv_pipe.adapters import Adapter, UnusableReply, build_adapter
from openenv_pipe.chat import ChatFormat
from openenv_pipe.config.schema import HubModelConfig, RunConfig, TinyModelConfig
from openenv_pipe.errors import ConfigError, FailureError, PipeError
from openenv_pipe.footprint import Shape, disk_bytes, folder_shape, memory_bytes, tiny_shape
from openenv_pipe.hosts.process import ProcessHost, manifest_app
from openenv_pipe.resources import find_env, load_callable, short_path
from openenv_pipe.rewards import Scorer
from openenv_pipe.session import Session
from openenv_pipe.tasks import make_task
from openenv_pipe.types import Task

HUB_TIMEOUT_S = 10.0
TIGHT = 0.8  # of what is available: estimates are not exact

Policy = Callable[[Sequence[Any], random.Random], str]
Trajectory = list[Any]


class Result(StrEnum):
    """What a check says."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


STYLES = {Result.OK: "green", Result.WARN: "yellow", Result.FAIL: "bold red"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report."""

    name: str
    result: Result
    text: str


def run_checks(config: RunConfig) -> list[Line]:
    """All checks, in the order in which a run would meet the problems."""
    lines: list[Line] = []
    for name, check in CHECKS.items():
        try:
            lines.extend(check(config))
        except PipeError as error:
            lines.append(Line(name, Result.FAIL, _without_log(error)))
    return lines


def has_failed(lines: Sequence[Line]) -> bool:
    """True if the run would fail."""
    return any(line.result is Result.FAIL for line in lines)


def as_table(lines: Sequence[Line]) -> Table:
    """The report for a terminal."""
    table = Table("check", "result", box=None, header_style="bold")
    table.add_column("what was found", overflow="fold")
    for line in lines:
        style = STYLES[line.result]
        table.add_row(line.name, f"[{style}]{line.result}[/]", escape(line.text))
    return table


def _without_log(error: PipeError) -> str:
    """The message without the path of a log that is deleted by now; its last lines are in it."""
    log = error.log if isinstance(error, FailureError) else None
    return str(error).replace(f" (log: {log})", "")


# --- what is written in Python and Jinja -------------------------------------------------------


def _check_code(config: RunConfig) -> Iterator[Line]:
    build_adapter(config.env.adapter)
    yield Line("adapter", Result.OK, f"{config.env.adapter.type}: templates and pattern are valid")
    Scorer(config.reward, config.env.success_reward)
    yield Line("rewards", Result.OK, f"terms: {', '.join(config.reward.terms)}")
    if (dotted := _policy_path(config)) is not None:
        load_callable(dotted)
        yield Line("policy", Result.OK, dotted)


def _policy_path(config: RunConfig) -> str | None:
    """The scripted policy of the engine or of the warm start, if there is one."""
    if config.engine.type == "scripted":
        return config.engine.policy
    return config.trainer.warm_start.policy if config.trainer.warm_start.steps else None


# --- the environment ---------------------------------------------------------------------------


def _check_environment(config: RunConfig) -> Iterator[Line]:
    env = config.env
    if env.command:
        program = env.command[0]
        if shutil.which(program) is None:
            raise ConfigError(f"env.command starts with {program!r}, which is not a program here")
        yield Line("environment", Result.OK, f"started by {program}")
    else:
        if env.package is None:
            raise ConfigError("neither env.package nor env.command is set; set one of them")
        package = find_env(env.package)
        app = manifest_app(package)
        yield Line("environment", Result.OK, f"{short_path(package)}, app {app}")
    with tempfile.TemporaryDirectory(prefix="openenv-pipe-check-") as log_dir:
        yield from asyncio.run(_try_servers(config, Path(log_dir)))


async def _try_servers(config: RunConfig, log_dir: Path) -> list[Line]:
    """Start the servers, open all sessions, play a task three times and another one once."""
    host = ProcessHost(config.env, config.host, log_dir)
    tasks = config.env.tasks.train
    first, other = make_task("train", tasks, 0), make_task("train", tasks, tasks.num_tasks - 1)
    dotted = _policy_path(config)
    probe = _Probe(config, load_callable(dotted) if dotted else None)
    try:
        await host.start()
        async with host.session() as session:
            played = [await probe.play(session, task) for task in (first, other, first)]
        # Others play in sessions of their own: some environments honour a seed only once.
        async with host.session() as session:
            played.append(await probe.play(session, first))
    finally:
        await host.close()
    return [
        Line("servers", Result.OK, f"{config.host.num_servers} started, answered and stopped"),
        _sessions_line(config, host.capacity),
        _seed_line(played[0], played[2], played[3]),
        *_tasks_lines(tasks.num_tasks, played[0], played[1], is_played=dotted is not None),
    ]


class _Probe:
    """Plays tasks with a scripted policy; without one only their first observation is seen."""

    def __init__(self, config: RunConfig, policy: Policy | None) -> None:
        self._env = config.env
        self._adapter: Adapter = build_adapter(config.env.adapter)
        self._policy = policy

    async def play(self, session: Session, task: Task) -> Trajectory:
        env, draw = self._env, random.Random(0)
        result = await session.reset({**task.reset, "seed": task.seed}, env.reset_timeout_s)
        self._adapter.open(result.observation)  # a template may name a field that is not there
        observations, trajectory = [result.observation], [_comparable(result)]
        while self._policy and not result.done and len(trajectory) <= env.max_turns:
            try:
                action = self._adapter.read(self._policy(observations, draw))
            except UnusableReply as unusable:
                raise ConfigError(f"the scripted policy's reply is unusable: {unusable}") from None
            result = await session.step(action, env.step_timeout_s)
            self._adapter.follow(result.observation)
            observations.append(result.observation)
            trajectory.append(_comparable(result))
        return trajectory


def _comparable(result: Any) -> tuple[Any, ...]:
    """An answer without what may differ between two plays of the same task."""
    seen = {key: value for key, value in result.observation.items() if key != "metadata"}
    return seen, result.reward, result.done


def _sessions_line(config: RunConfig, capacity: int) -> Line:
    num_episodes = config.trainer.tasks_per_step * config.trainer.group_size
    how = "all at once" if capacity >= num_episodes else f"{capacity} at a time"
    text = f"{capacity} opened; the {num_episodes} episodes of a step are played {how}"
    return Line("sessions", Result.OK, text)


def _seed_line(first: Trajectory, again: Trajectory, elsewhere: Trajectory) -> Line:
    if first == again == elsewhere:
        return Line("seeds", Result.OK, "the same task is the same in every session")
    return Line(
        "seeds",
        Result.WARN,
        "the same task with the same seed was not the same twice: a group compares episodes of "
        "different tasks, and a run cannot be repeated; look for a reset keyword that names a "
        "task (env.tasks.*.index_key)",
    )


def _tasks_lines(
    num_tasks: int, first: Trajectory, other: Trajectory, *, is_played: bool
) -> Iterator[Line]:
    if num_tasks == 1:
        return
    if first != other:
        yield Line("tasks", Result.OK, f"{num_tasks}; the first and the last differ")
    elif is_played:
        text = "the first and the last task are the same: does the environment read their keywords?"
        yield Line("tasks", Result.WARN, text)
    else:
        text = f"{num_tasks}; they look the same at first, and no policy is there to play further"
        yield Line("tasks", Result.OK, text)


# --- the model and the machine -----------------------------------------------------------------


def _check_model(config: RunConfig) -> Iterator[Line]:
    if config.engine.type == "scripted":
        return
    shape, line = _find_model(config.model)
    yield line
    if shape is None:
        text = "not estimated: the model's size is known after its download"
        yield Line("memory", Result.WARN, text)
        return
    yield _chat_line(config)
    yield _memory_line(config, shape)
    yield _disk_line(config, disk_bytes(shape, config))


def _chat_line(config: RunConfig) -> Line:
    from openenv_pipe.learner.load import load_tokenizer  # brings transformers

    ChatFormat(load_tokenizer(config.model))
    return Line("chat", Result.OK, "the template keeps earlier turns as they were written")


def _find_model(model: TinyModelConfig | HubModelConfig) -> tuple[Shape | None, Line]:
    if isinstance(model, TinyModelConfig):
        shape = tiny_shape(model)
        text = f"built from the seed, {shape.num_parameters / 1e6:.2f} million parameters"
        return shape, Line("model", Result.OK, text)
    folder = Path(model.path).expanduser()
    where = "folder" if folder.is_dir() else "cache"
    found = folder if folder.is_dir() else _cached_folder(model)
    if found is None:
        return None, _online_line(model)
    try:
        shape = folder_shape(found)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path={model.path!r} ({found}) cannot be read: {error}; expected config.json "
            "and *.safetensors of a causal language model"
        ) from error
    text = f"{model.path} ({where}), {shape.num_parameters / 1e9:.2f} billion parameters"
    return shape, Line("model", Result.OK, text)


def _cached_folder(model: HubModelConfig) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    except HFValidationError:
        raise ConfigError(
            f"model.path={model.path!r} is neither a folder here nor an id such as Qwen/Qwen3-0.6B"
        ) from None
    return Path(found).parent if isinstance(found, str) else None


def _online_line(model: HubModelConfig) -> Line:
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(model.path, revision=model.revision, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # no network, no such model, no permission: all are the answer
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"model.path={model.path!r} is no folder, is not cached, and cannot be had from the "
            f"model hub: {first_line}"
        ) from error
    return Line("model", Result.OK, f"{model.path} is on the model hub and will be downloaded")


def _memory_line(config: RunConfig, shape: Shape) -> Line:
    needed = memory_bytes(shape, config)
    place, available = _available_memory(config.device)
    total = sum(needed.values())
    largest = max(needed, key=lambda kind: needed[kind])
    text = f"about {_size(total)} of {_size(available)} on the {place}, mostly {largest}"
    if total <= TIGHT * available:
        return Line("memory", Result.OK, text)
    advice = "; lower trainer.tokens_per_batch or engine.max_batch, or use a smaller model"
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


def _disk_line(config: RunConfig, needed: int) -> Line:
    folder = Path(config.runs_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ConfigError(f"runs_dir={config.runs_dir!r}: {existing} cannot be written to")
    free = shutil.disk_usage(existing).free
    text = f"up to {_size(needed)} of {_size(free)} free in {config.runs_dir}"
    if needed <= TIGHT * free:
        return Line("disk", Result.OK, text)
    return Line("disk", Result.WARN, f"{text}; raise trainer.checkpoint_every or set runs_dir")


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit in ("B", "KiB") else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


CHECKS: dict[str, Callable[[RunConfig], Iterator[Line]]] = {
    "code": _check_code,
    "environment": _check_environment,
    "model": _check_model,
}
