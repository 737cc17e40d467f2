"""Find a run by the names that users give it: a folder, an id such as wordle/0007, `latest`."""

from pathlib import Path

from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.folder import RunFolder


def find_run(name: str, runs_dir: Path) -> RunFolder:
    """Open the run; `latest` is the newest in `runs_dir`. Raises RunFolderError."""
    if name == "latest":
        return _newest(runs_dir)
    if not Path(name).is_dir() and (runs_dir / name).is_dir():
        return RunFolder.open(runs_dir / name)
    return RunFolder.open(name)


def _newest(runs_dir: Path) -> RunFolder:
    found = []
    for record in runs_dir.glob("*/[0-9]*/run.json"):
        try:
            found.append(RunFolder.open(record.parent))
        except RunFolderError:
            continue  # `openenv-pipe runs` shows it as unreadable.
    if not found:
        raise RunFolderError(f"there is no run in {runs_dir}; name a run's folder")
    return max(found, key=lambda folder: folder.record.created)
