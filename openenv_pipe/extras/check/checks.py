"""All checks of `openenv-pipe check`: what `train` requires, then what can be tried beyond that.

Each check yields lines. An error meant for people becomes a failed line, and the next check goes
on. Nothing is loaded onto a GPU, nothing is downloaded.
"""

import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from openenv_pipe.commands.findings import Line, Result, Stopwatch, failed
from openenv_pipe.config.schema import PythonTarget, RunConfig
from openenv_pipe.errors import PipeError
from openenv_pipe.extras.check.environment import check_environment
from openenv_pipe.extras.check.model import (
    check_hub,
    check_lr,
    check_memory,
    check_precision,
    try_forward,
)
from openenv_pipe.pipeline.requirements import REQUIREMENTS, WARM_START
from openenv_pipe.registry import block_types, load
from openenv_pipe.system.progress import LineProgress, Progress
from openenv_pipe.trackers.build import build_tracker

_log = logging.getLogger(__name__)

Check = Callable[[RunConfig], Iterator[Line]]


def run_checks(config: RunConfig, progress: Progress | None = None) -> list[Line]:
    """Run all checks. A trial is left out where a requirement that it builds on is not met."""
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
    """Call the `trial` of the cluster's type with the configuration; it gives lines."""
    trial = block_types("cluster")[config.cluster.type].trial
    yield from load(trial)(config) if trial else ()


def _try_warm_start(config: RunConfig) -> Iterator[Line]:
    """Call the `trial` of the source's type with the configuration; it gives lines."""
    warm_start = config.trainer.warm_start
    trial = block_types("trainer.warm_start.source")[warm_start.source.type].trial
    yield from load(trial)(config) if trial and warm_start.steps else ()


def _try_engine(config: RunConfig) -> Iterator[Line]:
    """Call the `trial` of the engine's type with the configuration; it gives a text."""
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
