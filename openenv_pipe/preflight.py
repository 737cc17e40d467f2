"""`openenv-pipe check`: tries what a run needs, says what it found, and leaves nothing behind.

Each check yields lines; an error meant for people becomes a failed line, and the next check goes
on. Nothing is loaded onto a GPU, nothing is downloaded.
"""

import asyncio
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from openenv_pipe.adapters import Adapter, adapter_for, build_adapter
from openenv_pipe.chat import ChatFormat
from openenv_pipe.config.schema import EnvConfig, HubModelConfig, RunConfig, TinyModelConfig
from openenv_pipe.engines.vllm.check import check_engine
from openenv_pipe.engines.vllm.install import find_build
from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.findings import Line, Result, failed
from openenv_pipe.footprint import Shape, disk_bytes, folder_shape, memory_bytes, tiny_shape
from openenv_pipe.hosts import build_host
from openenv_pipe.hosts.package import manifest_app
from openenv_pipe.plays import Policy, begin, play_on, scripted
from openenv_pipe.resources import find_env, load_callable, short_path
from openenv_pipe.rewards import Scorer
from openenv_pipe.session import Session, ask_aside
from openenv_pipe.tasks import known_splits, open_splits
from openenv_pipe.types import Task

HUB_TIMEOUT_S = 10.0
TIGHT = 0.8  # of what is available: estimates are not exact

Trajectory = list[tuple[Any, ...]]


def run_checks(config: RunConfig) -> list[Line]:
    """All checks, in the order in which a run would meet the problems."""
    lines: list[Line] = []
    for name, check in CHECKS.items():
        try:
            lines.extend(check(config))
        except PipeError as error:
            lines.append(failed(name, error))
    return lines


# --- what is written in Python and Jinja -------------------------------------------------------


def _check_code(config: RunConfig) -> Iterator[Line]:
    build_adapter(config.env.adapter)
    yield Line("adapter", Result.OK, f"{config.env.adapter.type}: templates and pattern are valid")
    Scorer(config.reward, config.env.success_reward)
    yield Line("rewards", Result.OK, f"terms: {', '.join(config.reward.terms)}")
    if (dotted := _policy_path(config)) is not None:
        load_callable(dotted)
        yield Line("policy", Result.OK, dotted)
    for dotted in config.env.baselines.values() if config.eval.baselines else ():
        load_callable(dotted)


def _policy_path(config: RunConfig) -> str | None:
    """The scripted policy of the engine or of the warm start, if there is one."""
    if config.engine.type == "scripted":
        return config.engine.policy
    return config.trainer.warm_start.policy if config.trainer.warm_start.steps else None


# --- the environment ---------------------------------------------------------------------------


def _check_environment(config: RunConfig) -> Iterator[Line]:
    env = config.env
    if config.host.type == "attach":
        yield Line("environment", Result.OK, f"at {', '.join(config.host.urls)}")
    elif config.host.type == "kubernetes":
        yield Line("environment", Result.OK, f"image {config.host.image}")
    elif config.host.type == "docker":
        package = find_env(env.package) if env.package else None
        built = f"{short_path(package)}, {config.host.dockerfile}" if package else "no package"
        yield Line("environment", Result.OK, config.host.image or built)
    elif env.command:
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
    known_sets = known_splits(config)
    host = build_host(config, log_dir)
    dotted = _policy_path(config)
    try:
        await host.start()
        num_servers = len(host.urls)
        tasks = (await open_splits(config, known_sets, host.urls[0], host.access)).train
        first, other = tasks[0], tasks[len(tasks) - 1]
        adapter = await adapter_for(config.env.adapter, host.urls, host.access)
        policy = load_callable(dotted) if dotted else None
        play = partial(_play, adapter=adapter, policy=policy, env=config.env)
        async with host.session() as session:
            played = [await play(session, task) for task in (first, other, first)]
        # Others play in sessions of their own: some environments honour a seed only once.
        async with host.session() as session:
            played.append(await play(session, first))
    finally:
        await host.close()
    return [
        Line("servers", Result.OK, _servers_text(config, num_servers)),
        _sessions_line(config, host.capacity),
        _seed_line(played[0], played[2], played[3]),
        *_tasks_lines(len(tasks), played[0], played[1], is_played=dotted is not None),
    ]


def _servers_text(config: RunConfig, num_servers: int) -> str:
    if config.host.type == "attach":
        return f"{num_servers} answered"
    return f"{num_servers} started, answered and stopped"


async def _play(
    session: Session, task: Task, adapter: Adapter, policy: Policy | None, env: EnvConfig
) -> Trajectory:
    """The task, played by the policy; without one only its first observation is seen.

    Raises ConfigError where a template names a field that is not there.
    """
    play = await begin(session, task, env)
    ask = partial(ask_aside, session, env.step_timeout_s)
    opening = await adapter.open(play.results[0].observation, ask)
    if policy is not None:
        await play_on(session, play, scripted(policy, adapter, opening), env, random.Random(0))
    if play.refusals and not play.actions:
        raise play.refusals[0]
    for observation in play.observations[1:]:
        adapter.follow(observation)
    return play.comparable


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
    if config.engine.type in ("scripted", "openai"):
        return
    _refuse_missing_package(config)
    shape, line = _find_model(config.model)
    yield line
    if shape is None:
        text = "not estimated: the model's size is known after its download"
        yield Line("memory", Result.WARN, text)
        return
    yield _chat_line(config)
    yield _memory_line(config, shape)
    yield _disk_line(config, disk_bytes(shape, config))


def _refuse_missing_package(config: RunConfig) -> None:
    """Of what is kept in fewer bits."""
    optimizers = {"trainer.optimizer": config.trainer.optimizer}
    if config.trainer.warm_start.steps:
        optimizers["trainer.warm_start.optimizer"] = config.trainer.warm_start.optimizer
    needing = [f"{key}.type={o.type}" for key, o in optimizers.items() if o.type == "adamw_8bit"]
    if config.model.quantization != "none":
        needing.append(f"model.quantization={config.model.quantization}")
    if needing:
        from openenv_pipe.learner.quantized import load_bitsandbytes  # brings torch

        load_bitsandbytes(needing[0])


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


def _disk_line(config: RunConfig, needed: int) -> Line:
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


# --- where tokens come from --------------------------------------------------------------------


def _check_engine(config: RunConfig) -> Iterator[Line]:
    if config.engine.type == "vllm":
        build = "cpu" if config.device == "cpu" else find_build()
        yield Line("engine", Result.OK, check_engine(config.engine, build))


CHECKS: dict[str, Callable[[RunConfig], Iterator[Line]]] = {
    "code": _check_code,
    "environment": _check_environment,
    "model": _check_model,
    "engine": _check_engine,
}
