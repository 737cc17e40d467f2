"""What a run reports while it works: stages, steps and notes, as lines of text.

The library logs these lines (`LineProgress(logger.info)`). The command line shows them on a
terminal (`cli/progress.py`). The only numbers computed here are the time that is left, and how many
episodes of a phase are finished.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, Protocol

LONG_WAIT_S = 20.0  # after which a person is told what the run waits for
MAX_SILENCE_S = 120.0  # after which the person is told again
NUMBERS = {  # shown label to metric's key and format; a metric that a record lacks is left out
    "reward": ("reward/mean", "{:.3f}"),
    "success": ("success/rate", "{:.2f}"),
    "loss": ("loss/supervised", "{:.3f}"),
    "tokens/s": ("time/tokens_per_s", "{:.0f}"),
}


class EpisodeCount:
    """Counts the episodes of a phase, whichever rollout batches they belong to."""

    def __init__(self) -> None:
        self.finished = 0
        self.total = 0  # 0: not known yet

    def __str__(self) -> str:
        return f"{self.finished} of {self.total} episodes are finished" if self.total else ""


class Progress(Protocol):
    """Receives what the pipeline reports. One thread calls it."""

    def phase(self, text: str, count: EpisodeCount | None = None) -> AbstractContextManager[None]:
        """Say what is done while the block runs, such as "loading the model".

        count: of the episodes that the block plays, if it does.
        """

    def remind(self, text: str) -> None:
        """Report that a phase still goes on, unless a person sees it anyway."""

    def stage(self, name: str, total_steps: int) -> None:
        """A stage of `total_steps` begins; the one before it has ended."""

    def advance(self, record: Mapping[str, Any]) -> None:
        """A step of the stage is done; `record` is its line of metrics.jsonl, `step` from 1."""

    def note(self, text: str) -> None:
        """Report a sentence."""

    def close(self) -> None:
        """Nothing more is reported about the current stage."""


class LineProgress:
    """Passes one line for each step, and each note, to a function such as `logger.info`."""

    def __init__(self, emit: Callable[[str], object]) -> None:
        self._emit = emit
        self._pace = StagePace("", 0)

    @contextmanager
    def phase(self, text: str, count: EpisodeCount | None = None) -> Iterator[None]:
        self.note(text)
        yield

    def remind(self, text: str) -> None:
        self.note(text)

    def stage(self, name: str, total_steps: int) -> None:
        self._pace = StagePace(name, total_steps)

    def advance(self, record: Mapping[str, Any]) -> None:
        self.note(self._line_of_step(record))

    def _line_of_step(self, record: Mapping[str, Any]) -> str:
        """Count a step, and return its line."""
        self._pace.advance(record["step"])
        return " ".join([self._pace.title, *step_numbers(record), self._pace.left()])

    def note(self, text: str) -> None:
        self._emit(text)

    def close(self) -> None:
        """Do nothing: lines need no end."""


class StagePace:
    """A stage's name, its number of steps, and its speed in this process."""

    def __init__(self, name: str, total_steps: int) -> None:
        self.name = name
        self.total_steps = total_steps
        self.step = 0
        self._started_s = time.monotonic()
        self._advanced_s = self._started_s
        self._num_done = 0

    @property
    def title(self) -> str:
        return f"{self.name} {self.step}/{self.total_steps}"

    def advance(self, step: int) -> None:
        """Count a step that is done. step: its number, from 1."""
        self.step = step
        self._num_done += 1
        self._advanced_s = time.monotonic()

    def left(self) -> str:
        """Return the time left, as a text; while no step ends, the time since the last one."""
        idle_s = time.monotonic() - self._advanced_s
        pace_s = (self._advanced_s - self._started_s) / max(self._num_done, 1)
        if not self._num_done or idle_s > max(LONG_WAIT_S, 3 * pace_s):
            return f"no step for {clock(idle_s)}"
        return f"left {clock(pace_s * max(self.total_steps - self.step, 0))}"


@asynccontextmanager
async def long_phase(progress: Progress, text: str) -> AsyncIterator[EpisodeCount]:
    """Say what is done while the block runs, and again whenever it has taken long.

    The block gets a count, in which it counts the episodes that it plays.
    """
    count = EpisodeCount()
    with progress.phase(text, count):
        async with reporting_long_waits(f"still {text}", progress.remind, count):
            yield count


@asynccontextmanager
async def reporting_long_waits(
    text: str, notify: Callable[[str], None], count: EpisodeCount | None = None
) -> AsyncIterator[None]:
    """Call `notify` after `LONG_WAIT_S`, at each doubling, and at least every `MAX_SILENCE_S`.

    text: such as "waiting for the servers (log: env-0.log)".
    count: of the episodes that the block plays.
    """

    async def keep_telling() -> None:
        waited_s, pause_s = 0.0, LONG_WAIT_S
        while True:
            await asyncio.sleep(pause_s)
            waited_s += pause_s
            counted = str(count or "")
            notify(f"{text}, for {clock(waited_s)} so far" + (counted and f": {counted}"))
            pause_s = min(waited_s, MAX_SILENCE_S)

    teller = asyncio.create_task(keep_telling())
    try:
        yield
    finally:
        teller.cancel()
        await asyncio.gather(teller, return_exceptions=True)


def clock(seconds: float) -> str:
    """A duration as people write it: 0:07, 3:12, 1:02:45."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def step_numbers(record: Mapping[str, Any]) -> list[str]:
    """The metrics of a step that a person watches, as "label value"."""
    return [
        f"{label} {form.format(record[key])}"
        for label, (key, form) in NUMBERS.items()
        if record.get(key) is not None
    ]
