"""`openenv_pipe.rescore`: the command as a function."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import SupportsIndex

from openenv_pipe.commands.api import RunName, in_thread, run_control, run_name, step_number
from openenv_pipe.extras.rescore.rescore import Rescored, rescore_run


def rescore(
    run: RunName,
    *overrides: str,
    output: str | os.PathLike[str] | None = None,
    step: SupportsIndex | None = None,
    trust: bool = False,
    on_progress: Callable[[str], object] | None = None,
) -> Rescored:
    """Score a run's recorded episodes by another reward: `rescore("wordle/0007", "reward=usable")`.

    overrides: keys of `reward` and `judge`.
    output: a folder that does not exist; default: RUN_rescored, beside the run's folder.
    step: only the episodes of this step; default: of all.
    trust: also score a run whose folder another user made, or that was changed since.
    on_progress: as in `train`.
    Returns the folder of the new episodes and what has changed: `changes.means` and
    `changes.agreement`. Raises ConfigError, RunFolderError and FailureError.
    """
    number = step_number("step", step)
    control = run_control(on_progress)
    words = [run_name(each) for each in (run, *overrides)]
    target = None if output is None else Path(output)
    return in_thread(
        lambda: control.stop.run(
            rescore_run(words, target, step=number, trust=trust, notify=control.progress.note)
        ),
        control,
    )
