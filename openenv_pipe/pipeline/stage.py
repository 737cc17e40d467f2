"""What the stages of a run have in common: their interface, and what they work with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from openenv_pipe.pipeline.checkpoints import Saver
from openenv_pipe.pipeline.components import Components
from openenv_pipe.pipeline.group_sources import GroupSource
from openenv_pipe.pipeline.metrics_log import MetricsLog
from openenv_pipe.pipeline.weight_publisher import WeightPublisher
from openenv_pipe.runs.checkpoints import StageStep


class Evaluator(Protocol):
    """Evaluates the policy as it is and keeps the reports. What is done is not done again."""

    async def baselines(self) -> None:
        """Evaluate the scripted players."""
        ...

    async def stage(self, label: str, step: int) -> None:
        """Evaluate the policy before or after a stage; `step` steps of GRPO are behind it."""
        ...

    async def during(self, step: int) -> str | None:
        """Evaluate between two steps if one is due; return why training may end here, if it may."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StageContext:
    """What the stages of a run work with."""

    components: Components
    source: GroupSource
    publisher: WeightPublisher
    evaluator: Evaluator
    saver: Saver
    metrics_log: MetricsLog
    folder: Path  # of the run


class Stage(Protocol):
    """One stage of a run. It is at its place in the list of `stages`."""

    def is_done(self, at: StageStep | None) -> bool:
        """Whether a run that has come as far as `at` has nothing left to do here.

        at: None at the beginning of a run that starts with untrained weights.
        """
        ...

    async def run(self, at: StageStep | None, checkpoint: Path | None) -> StageStep | None:
        """Do what is left of the stage; return how far the run has come then.

        checkpoint: the one that this attempt goes on from, if any.
        """
        ...

    async def save_unsaved(self) -> None:
        """Save weights that no checkpoint has yet, because the run is about to end here."""
        ...
