"""What both stages of training share: steps that are whole, and lines that say so."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.learner.distributed.workers import Workers
from openenv_pipe.models.policy import Policy
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import MetricsFile, read_metrics
from openenv_pipe.system.progress import Progress
from openenv_pipe.trackers import Tracker, build_tracker

Result = TypeVar("Result")


class Workbench(Protocol):
    """What training needs of a run's parts: the policy, the thread that torch works in, and the
    processes of further devices."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def workers(self) -> Workers | None: ...

    async def compute(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Runs torch work in its thread."""
        ...


class Journal:
    """Each step's metrics: to metrics.jsonl, to the tracker, and to the person who watches."""

    def __init__(self, config: RunConfig, folder: RunFolder, progress: Progress) -> None:
        self._metrics = MetricsFile(folder.metrics_path)
        self._tracker: Tracker = build_tracker(config.tracker, folder.path)
        self._progress = progress
        for record in read_metrics(folder.metrics_path):  # of attempts before this one
            self._tracker.log(record)

    def begin(self, stage: str, num_steps: int) -> None:
        self._progress.stage(stage, num_steps)

    def write(self, stage: str, step: int, metrics: Mapping[str, Any], started: float) -> None:
        record = {
            "step": step,
            "stage": stage,
            **metrics,
            "time/step_s": time.perf_counter() - started,
        }
        self._metrics.append(record)
        self._tracker.log(record)
        self._progress.advance(record)

    def note(self, text: str) -> None:
        self._progress.note(text)

    def close(self) -> None:
        self._metrics.close()
        self._tracker.close()


async def to_the_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits work that must not stop halfway: a cancellation is kept back until it is done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
