"""What a resume may change in a run's configuration, while the run did each of its steps.

The learning rate's schedule and the episodes that are played ahead depend on `trainer.steps`. When
a run stops and what it evaluates and saves depend on `eval.during`, `trainer.guard` and
`trainer.checkpoint`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from openenv_pipe.config.compose import readable_errors
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.secrets import restore_in_config
from openenv_pipe.errors import RunFolderError
from openenv_pipe.pipeline.start import MAY_CHANGE
from openenv_pipe.runs.checkpoints import StageStep
from openenv_pipe.runs.folder import RunFolder

STEPS = "trainer.steps"
# They say where a run computes and who follows it, which may be another place in a repetition.
ELSEWHERE = ("cluster", "tracker", "trainer.devices", "trainer.replicas")
REPEATED = tuple(key for key in MAY_CHANGE if key not in ELSEWHERE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The steps of GRPO from `start`, exclusive, to the next span or the end of the run."""

    start: int
    num_planned: int  # `trainer.steps`
    others: Mapping[str, JsonValue]  # the other keys that ever changed; None: null or not there

    def of(self, config: RunConfig) -> RunConfig:
        """Return a run's configuration in these steps. Raises ConfigError if it is not valid."""
        values = config.model_dump(mode="json")
        for key, value in {**self.others, STEPS: self.num_planned}.items():
            _assign(values, key, restore_in_config(value))
        with readable_errors():
            return RunConfig.model_validate(values)


def planned_spans(folder: RunFolder) -> list[Span]:
    """Return the spans of a run, which begin with step 0 and differ in what a resume changed."""
    changes = [_repeated(attempt.changed) for attempt in folder.attempts]
    values: dict[str, JsonValue] = {STEPS: folder.written_config.trainer.steps}
    for change in reversed(changes):
        values |= {key: before for key, (before, _) in change.items()}
    spans: list[Span] = []
    for attempt, change in zip(folder.attempts, changes, strict=True):
        values |= {key: now for key, (_, now) in change.items()}
        place = StageStep.of(Path(attempt.checkpoint)) if attempt.checkpoint else None
        start = place.step if place is not None and place.stage == "grpo" else 0
        # What was done after the checkpoint is done again.
        spans = [span for span in spans if span.start < start]
        others = dict(values)
        span = Span(start=start, num_planned=_number(others.pop(STEPS)), others=others)
        if not spans or (spans[-1].num_planned, spans[-1].others) != (span.num_planned, others):
            spans.append(span)
    return spans


def _repeated(changed: Mapping[str, list[JsonValue]]) -> dict[str, list[JsonValue]]:
    """Return those changes of an attempt that a repetition makes again, as [before, now]."""
    found = {key: values for key, values in changed.items() if key.startswith(REPEATED)}
    return {key: values for key, values in found.items() if len(values) == 2}


def _number(value: JsonValue) -> int:
    if not isinstance(value, int):
        raise RunFolderError(f"an attempt changed {STEPS} to {value!r:.80}; expected a number")
    return value


def _assign(values: dict[str, Any], key: str, value: JsonValue) -> None:
    """Set a dotted key. A block becomes null with its last key."""
    # Changes list each key of a block, with null where there is no such block.
    first, _, rest = key.partition(".")
    if not rest:
        values[first] = value
        return
    if not isinstance(values.get(first), dict):
        if value is None:
            return
        values[first] = {}
    _assign(values[first], rest, value)
    if all(each is None for each in values[first].values()):
        values[first] = None
