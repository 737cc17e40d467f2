"""The interface of a run's stages, and the context that they share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from openenv_pipe.pipeline.checkpoints import Saver
from openenv_pipe.pipeline.components import Components
from openenv_pipe.pipeline.group_sources import GroupSource
from openenv_pipe.pipeline.metrics_log import MetricsLog
from openenv_pipe.pipeline.replay import Replay
from openenv_pipe.runs.checkpoints import StageStep
from openenv_pipe.system.progress import Progress


class Evaluator:
    """Evaluates the current policy and saves the reports, each evaluation once.

    This one does nothing, for runs that are not evaluated.
    """

    async def check_tasks(self) -> None:
        """Show warnings about the tasks, such as one that begins differently the second time."""

    async def baselines(self) -> None:
        """Evaluate the scripted policies."""

    async def stage(self, label: str, step: int) -> None:
        """Evaluate the policy, which `step` steps of GRPO have trained, before or after a stage."""

    async def during(self, step: int) -> str | None:
        """Evaluate between two steps if one is due; return why training ends here, if it does."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageContext:
    components: Components
    source: GroupSource
    replay: Replay
    evaluator: Evaluator
    saver: Saver
    metrics_log: MetricsLog
    progress: Progress
    folder: Path  # of the run


class Stage(Protocol):
    """One stage of a run; `stages.py` has the list of stages, in order."""

    def is_done(self, at: StageStep | None) -> bool:
        """Return whether a run that has reached `at` has nothing left to do in this stage.

        at: the last step that is done; None at the start of a run with untrained weights.
        """

    async def run(self, at: StageStep | None, checkpoint: Path | None) -> StageStep | None:
        """Run the rest of the stage; return the last step that is done then.

        checkpoint: the checkpoint that this attempt resumes from, if any.
        """

    async def save_unsaved(self) -> None:
        """Save weights that are in no checkpoint yet, because the run ends in this stage."""
