"""`openenv_pipe.export`: the command as a function."""

import os
from collections.abc import Callable
from pathlib import Path

from openenv_pipe.commands.api import RunName, in_thread, run_control, run_name


def export(
    run: RunName,
    output: str | os.PathLike[str] | None = None,
    *,
    trust: bool = False,
    on_progress: Callable[[str], object] | None = None,
) -> Path:
    """Export a checkpoint as a Hugging Face folder: `export("wordle/0007@best", "models/wordle")`.

    run: a run, for its last checkpoint, or a checkpoint as "RUN@40", "RUN@best" or "RUN@start".
    output: the folder to make; default: RUN/export/NAME.
    trust: also export from a run whose folder another user made, or that was changed since.
    on_progress: receives a line about what was compared; default: the log, at level INFO.
    Returns the folder. Raises ConfigError, RunFolderError and FailureError.
    """
    from openenv_pipe.extras.export.command import export_run

    control = run_control(on_progress)
    target = None if output is None else Path(output)
    return in_thread(
        lambda: export_run(run_name(run), target, trust=trust, notify=control.progress.note),
        control,
    )
