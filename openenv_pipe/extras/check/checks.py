"""All checks of `openenv-pipe check`: what `train` requires, then what can be tried beyond that.

Each check yields lines. A PipeError becomes a failed line, and the next check runs. Nothing is
loaded onto a GPU, and nothing is downloaded.
"""

import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from openenv_pipe.commands.findings import Line, Result, Stopwatch, failed
from openenv_pipe.commands.machine import disk_line, find_shape, memory_line
from openenv_pipe.config.learning_rates import describe_lr, warn_of_lr
from openenv_pipe.config.precision import warn_of_precision
from openenv_pipe.config.schema import HubModelConfig, PythonTarget, RunConfig
from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.extras.check.environment import check_environment
from openenv_pipe.models.forward.forward_check import UNPROBED, check_forward
from openenv_pipe.models.hub import (
    find_made_model,
    find_model_folder,
    is_on_this_machine,
    reject_unreachable,
)
from openenv_pipe.models.load import build_empty, load_policy
from openenv_pipe.models.teacher import find_teacher_shapes
from openenv_pipe.pipeline.requirements import REQUIREMENTS, WARM_START
from openenv_pipe.registry import block_types, load
from openenv_pipe.system.progress import LineProgress, Progress
from openenv_pipe.trackers.build import build_tracker

MAX_TRIED = 2_000_000_000  # parameters; a larger model is not loaded for a check
_log = logging.getLogger(__name__)
Check = Callable[[RunConfig], Iterator[Line]]


def check_hub(config: RunConfig) -> Iterator[Line]:
    """Ask the hub for a model that is not on this machine. Raises ConfigError if that fails."""
    model = config.model
    if not isinstance(model, HubModelConfig) or find_model_folder(model) is not None:
        return
    made = find_made_model(model)
    if made and not made.is_on_hub:
        yield Line("model", Result.OK, f"{model.path} will be converted to safetensors")
        return
    text = f"{model.path} is on the model hub and will be downloaded"
    try:
        reject_unreachable(model)
    except ConfigError as error:
        if made is None:
            raise
        text = f"{error}; will be downloaded as {made.about}"
    yield Line("model", Result.OK, text)


def check_lr(config: RunConfig) -> Iterator[Line]:
    """Compare learning rates with the defaults, and warn of one that may destroy the model."""
    if config.engine.capabilities.can_train and (text := describe_lr(config)):
        yield Line("learning rate", Result.OK, text)
        if warning := warn_of_lr(config):
            yield Line("learning rate", Result.WARN, warning)


def check_precision(config: RunConfig) -> Iterator[Line]:
    if warning := warn_of_precision(config):
        yield Line("precision", Result.WARN, warning)


def try_forward(config: RunConfig) -> Iterator[Line]:
    """Load the model on the CPU, and choose how it is sampled and trained, as `train` does.

    Raises ConfigError: no forward pass agrees with the model's own.
    """
    if not config.engine.capabilities.needs_tokenizer or not is_on_this_machine(config.model):
        return
    num_parameters = sum(each.numel() for each in build_empty(config.model).parameters())
    if num_parameters > MAX_TRIED or config.model.quantization != "none":
        text = "not tried: the model is large or quantized; the run chooses after loading it"
        yield Line("forward", Result.OK, text)
        return
    max_tokens = config.max_episode_tokens
    policy = load_policy(
        config.model, seed=config.seed, device=torch.device("cpu"), max_tokens=max_tokens
    )
    packing = check_forward(policy, max_tokens)
    text = "trained in packed rows" if packing is None else f"trained in padded rows ({packing})"
    if config.engine.samples_in_process:
        why = [f"not {name}: {reason}" for name, reason in policy.samplers_left_out.items()]
        text += f"; sampling is {policy.sampler}" + (f" ({'; '.join(why)})" if why else "")
    yield Line("forward", Result.OK, text)
    if why_not := policy.left_out.get(UNPROBED):
        yield Line("forward", Result.WARN, f"not {UNPROBED}: {why_not}")


def check_memory(config: RunConfig) -> Iterator[Line]:
    if isinstance(config.model, HubModelConfig) and find_model_folder(config.model) is None:
        text = "not estimated: the model's size is known after its download"
        yield Line("memory", Result.WARN, text)
        return
    if (shape := find_shape(config.model)) is None:
        text = "not estimated: the model's config.json has other keys than decoders such as Qwen3"
        yield Line("memory", Result.WARN, text)
        return
    yield memory_line(config, shape, find_teacher_shapes(config))
    yield disk_line(config, shape)


def run_checks(config: RunConfig, progress: Progress | None = None) -> list[Line]:
    """Run all checks, and skip the trials that depend on a failed requirement."""
    progress = progress or LineProgress(_log.info)
    lines: list[Line] = []
    watch = Stopwatch()
    rejected: set[str] = set()
    with progress.phase("checking what the run needs"):
        for name, require in REQUIREMENTS.items():
            try:
                found = require(config)
            except PipeError as error:
                rejected.add(name)
                if not any(line.text == str(error) for line in lines):  # told once is enough
                    lines.append(watch.lap(failed(name, error)))
            else:
                lines += [watch.lap(Line(name, Result.OK, found))] if found else []
    for name, (check, builds_on) in TRIALS.items():
        if rejected & builds_on:
            continue
        try:
            with progress.phase(f"trying: {name}"):
                lines.extend(map(watch.lap, check(config)))
        except PipeError as error:
            lines.append(watch.lap(failed(name, error)))
    return lines


def _try_tracker(config: RunConfig) -> Iterator[Line]:
    """Build each tracker once, for a folder that is removed again; they connect to nothing."""
    for name, tracker in config.tracker.items():
        with tempfile.TemporaryDirectory(prefix="openenv-pipe-check-") as folder:
            build_tracker(name, tracker, Path(folder))
        target = tracker.target if isinstance(tracker, PythonTarget) else tracker.type
        yield Line("tracker", Result.OK, target)


def _try_cluster(config: RunConfig) -> Iterator[Line]:
    """Call the `trial` of the cluster's type with the configuration; it yields lines."""
    trial = block_types("cluster")[config.cluster.type].trial
    yield from load(trial)(config) if trial else ()


def _try_warm_start(config: RunConfig) -> Iterator[Line]:
    """Call the `trial` of the source's type with the configuration; it yields lines."""
    warm_start = config.trainer.warm_start
    trial = block_types("trainer.warm_start.source")[warm_start.source.type].trial
    yield from load(trial)(config) if trial and warm_start.steps else ()


def _try_engine(config: RunConfig) -> Iterator[Line]:
    """Call the `trial` of the engine's type with the configuration; it returns a text."""
    trial = block_types("engine")[config.engine.type].trial
    if trial and (found := load(trial)(config)):
        yield Line("engine", Result.OK, found)


# By the name of the failed line: a trial, and the requirements that it builds on.
TRIALS: dict[str, tuple[Check, set[str]]] = {
    "tracker": (_try_tracker, {"tracker"}),
    "environment": (
        check_environment,
        {"ports", "environment", "adapter", "tasks", "policies", "rewards"},
    ),
    "cluster": (_try_cluster, {"cluster", "environment", "adapter"}),
    "model": (check_hub, {"settings", "model"}),
    "learning rate": (check_lr, {"settings"}),
    "precision": (check_precision, {"settings"}),
    "memory": (check_memory, {"settings", "model", "device", "run folder"}),
    "forward": (try_forward, {"settings", "model", "device"}),
    "engine": (_try_engine, {"engine"}),
    WARM_START: (_try_warm_start, {"settings", "model", "chat", WARM_START}),
}
