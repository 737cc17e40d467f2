"""`openenv_pipe.compare`: the command as a function."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from openenv_pipe.commands.api import RunName, run_name

if TYPE_CHECKING:
    from openenv_pipe.extras.viewer.compare.grouping import Comparison


def compare(*runs: RunName, runs_dir: str | os.PathLike[str] | None = None) -> "Comparison":
    """Compare the settings of runs and their results: `compare("wordle/0003", "wordle/0004")`.

    runs: runs, or the folder of one sweep. Runs that differ only in the seed are one setting.
    runs_dir: where runs are looked for; default: `runs`.
    A notebook shows the returned comparison as a table, and `print` writes it as Markdown.
    Raises RunFolderError.
    """
    from openenv_pipe.extras.viewer.compare.grouping import compare_settings
    from openenv_pipe.extras.viewer.compare.load import find_runs

    folder = None if runs_dir is None else Path(runs_dir)
    return compare_settings(find_runs([run_name(run) for run in runs], folder))
