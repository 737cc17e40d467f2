"""The command `compare`: how the settings of runs differ, and their results.

It only reads run folders, also of failed and running runs. To evaluate models again on the same
tasks, use `eval RUN RUN`.
"""

from collections.abc import Sequence
from pathlib import Path

from openenv_pipe.errors import RunFolderError
from openenv_pipe.reports.compare.curves import draw_curves
from openenv_pipe.reports.compare.grouping import Comparison, compare_settings
from openenv_pipe.reports.compare.html import page
from openenv_pipe.reports.compare.load import find_runs
from openenv_pipe.system.files import write_text


def compare(
    targets: Sequence[str], output: Path | None, runs_dir: Path | None = None
) -> tuple[Comparison, Path]:
    """Compare runs and write compare.png and compare.html; return the path of the latter too.

    Raises:
        RunFolderError: A target is neither a run nor a sweep, or nothing can be written.
    """
    found = find_runs(targets, runs_dir)
    comparison = compare_settings(found)
    folder = output or found.home
    written = folder / "compare.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        picture = folder / "compare.png"
        drawn = draw_curves(picture, comparison)
        write_text(written, page(comparison, picture if drawn else None, folder))
    except OSError as error:
        raise RunFolderError(
            f"the comparison cannot be written to {folder}: {error}; name another folder by "
            "--output"
        ) from error
    return comparison, written
