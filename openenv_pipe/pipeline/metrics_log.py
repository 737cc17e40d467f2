"""Metric logging and cancellation shielding, which both training stages use."""

import asyncio
import math
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.pipeline.callbacks import Callback, Callbacks
from openenv_pipe.reports.alarms import AlarmWatch
from openenv_pipe.reports.unscored import UnscoredWatch
from openenv_pipe.reports.unusable import UnusableWatch
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import MEMORY, MetricsFile, read_metrics
from openenv_pipe.runs.run import Run
from openenv_pipe.system.process_id import ProcessId
from openenv_pipe.system.progress import Progress
from openenv_pipe.trackers.build import Trackers
from openenv_pipe.types import Group

MEMORY_EVERY_S = 10.0  # because a measurement looks at all processes of the machine
CALLBACK_GRACE_S = 10.0
Result = TypeVar("Result")


class MetricsLog:
    """Passes each step's metrics to metrics.jsonl, trackers, the progress and the callbacks."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        progress: Progress,
        callbacks: Sequence[Callback] = (),
        trackers: Trackers | None = None,
    ) -> None:
        """trackers: closed by whoever made them; None: no trackers."""
        self._metrics = MetricsFile(folder.metrics_path)
        self._trackers = trackers
        self._progress = progress
        self._callbacks = Callbacks(callbacks)
        self._run = Run(folder.path)
        self._last: Mapping[str, Any] = {}
        self._process = ProcessId.of_this_process()
        self._memory_measured_s = -math.inf
        self._unusable = UnusableWatch(config.trainer.unusable_limit)
        self._unscored = UnscoredWatch(config.trainer.steps)
        records = read_metrics(folder.metrics_path, budget=None)  # of attempts before this one
        trainer = config.trainer
        self.alarms = AlarmWatch(records, trainer.max_mismatch, forgets=trainer.guard == "back")
        for record in records:
            self._track(record)
            self._unusable.warning(record)
            self._unscored.warning(record)

    def write(
        self,
        stage: str,
        step: int,
        metrics: Mapping[str, Any],
        started: float,
        groups: Sequence[Group] = (),
    ) -> None:
        """Record a step. groups: its episodes, for trackers and warnings.

        Raises FailureError if too many steps in a row had no episode with a reward.
        """
        record = {
            "step": step,
            "stage": stage,
            **metrics,
            "time/step_s": time.perf_counter() - started,
            **self._memory(),
        }
        # What a resumed run reads in the line, trackers and warnings get now: null instead of NaN.
        written = self._metrics.append(record)
        self._track(written, groups)
        self._progress.advance(record)
        warnings = (
            self._unusable.exceptions(written, groups),
            self._unusable.warning(written),
            self._unscored.warning(written, groups),
            *self.alarms.new_alarms(written),
        )
        for warning in filter(None, warnings):
            self._progress.note(warning)
        self._last = record
        self._unscored.check(groups)

    def _memory(self) -> dict[str, float]:
        """Measure the memory of the run's processes, if that is due."""
        now_s = time.monotonic()
        if now_s - self._memory_measured_s < MEMORY_EVERY_S:
            return {}
        self._memory_measured_s = now_s
        found = self._process.memory_bytes
        return {} if found is None else {MEMORY: found / 2**30}

    async def call_back(self) -> str | None:
        """Call the callbacks with the last step's metrics; return their reason to stop, if any.

        A cancellation leaves them `CALLBACK_GRACE_S` to end.
        """
        calling = asyncio.create_task(self._callbacks.call(self._run, self._last))
        try:
            return await asyncio.shield(calling)
        except asyncio.CancelledError:
            await asyncio.wait({calling}, timeout=CALLBACK_GRACE_S)
            calling.cancel()
            await asyncio.wait({calling})  # in bounded time
            raise

    def close(self) -> None:
        self._metrics.close()

    def _track(self, record: Mapping[str, Any], groups: Sequence[Group] = ()) -> None:
        if self._trackers is not None:
            self._trackers.log(record, groups)


async def finish_despite_cancel(work: Coroutine[Any, Any, Result]) -> Result:
    """Await work that must not be cancelled; raise a cancellation only after it is done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
