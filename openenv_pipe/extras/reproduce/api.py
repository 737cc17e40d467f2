"""`openenv_pipe.reproduce`: the command as a function."""

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

from openenv_pipe.commands.api import RunName, in_thread, run_control, run_name, step_number

if TYPE_CHECKING:  # it imports torch
    from openenv_pipe.extras.reproduce.command import Reproduction


def reproduce(
    run: RunName,
    *,
    steps: SupportsIndex | None = None,
    allow: Collection[str] = (),
    replay: bool = False,
    runs_dir: str | os.PathLike[str] | None = None,
    trust: bool = False,
    on_progress: Callable[[str], object] | None = None,
) -> "Reproduction":
    """Run a run again in a new folder, and say whether it is the same.

    steps: repeat only this many steps of GRPO; default: all that the run has.
    allow: what may differ beforehand: code, versions, data, model.
    replay: train on the recorded episodes and play none.
    runs_dir: where the new run goes; default: the folder of runs that the run names.
    trust: run what the run's folder names, even if another user made the folder or it was changed.
    Raises ConfigError, RunFolderError and FailureError.
    """
    from openenv_pipe.extras.reproduce.command import reproduce as reproduce_run

    num_steps = step_number("steps", steps)
    control = run_control(on_progress)
    return in_thread(
        lambda: reproduce_run(
            run_name(run),
            steps=num_steps,
            allow=allow,
            is_replay=replay,
            runs_dir=None if runs_dir is None else Path(runs_dir),
            command=["openenv_pipe.reproduce", run_name(run)],
            control=control,
            trust=trust,
        ),
        control,
    )
