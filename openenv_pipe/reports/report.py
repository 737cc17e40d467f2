"""The report of a run, which an extra writes."""

from pathlib import Path

from openenv_pipe.registry import extras, load
from openenv_pipe.runs.folder import RunFolder


def write_report(folder: RunFolder) -> Path:
    """Write the report of a run in any state; return its path, or the run folder without an extra.

    Raises RunFolderError: A file of the run is damaged.
    """
    for extra in extras():
        if extra.report:
            path: Path = load(extra.report)(folder)
            return path
    return folder.path
