"""How many steps a run was planned to have, while it did each of them.

The learning rate's schedule and the episodes that are played ahead depend on `trainer.steps`, which
may change when a run is resumed.
"""

from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.runs.checkpoints import StageStep
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.record import AttemptRecord

STEPS = "trainer.steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The steps of GRPO from `start`, exclusive, to the next span or the end of the run."""

    start: int
    num_planned: int  # `trainer.steps`

    def of(self, config: RunConfig) -> RunConfig:
        trainer = config.trainer.model_copy(update={"steps": self.num_planned})
        return config.model_copy(update={"trainer": trainer})


def planned_spans(folder: RunFolder) -> list[Span]:
    """Return the spans of a run, which begin with step 0 and differ in `num_planned`."""
    changes = [_change(attempt) for attempt in folder.attempts]
    first = next((change for change in changes if change), None)
    num_planned = first[0] if first else folder.written_config.trainer.steps
    spans: list[Span] = []
    for attempt, change in zip(folder.attempts, changes, strict=True):
        num_planned = change[1] if change else num_planned
        place = StageStep.of(Path(attempt.checkpoint)) if attempt.checkpoint else None
        start = place.step if place is not None and place.stage == "grpo" else 0
        # What was done after the checkpoint is done again.
        spans = [span for span in spans if span.start < start]
        if not spans or spans[-1].num_planned != num_planned:
            spans.append(Span(start=start, num_planned=num_planned))
    return spans


def _change(attempt: AttemptRecord) -> tuple[int, int] | None:
    """Return what an attempt changed `trainer.steps` from and to, if it did."""
    match attempt.changed.get(STEPS):
        case [int(before), int(now)]:
            return before, now
    return None
