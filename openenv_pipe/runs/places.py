"""The folders in which runs are looked for, and hints for a folder that is no run folder.

A run may go to any folder (`runs_dir`), so each one that is not the default is noted in the user's
state folder, by the working directory that it was started from. Without that note `latest` would be
an older run of the default folder.
"""

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from openenv_pipe.errors import RunFolderError
from openenv_pipe.registry import if_command
from openenv_pipe.runs.user_key import NoKeyError, key_path
from openenv_pipe.system.resources import short_path

# Of run folders; raised whenever the keys of config.json or the contents of another file change.
FORMAT = 12
# conf/config.yaml takes the default of runs_dir from it, too.
VARIABLE = "OPENENV_PIPE_RUNS_DIR"
MAKES_FIRST_RUN = "`openenv-pipe demo` or `openenv-pipe train conf=wordle` makes the first run"


def default_folder() -> Path:
    """Return the folder for runs whose configuration names no other."""
    return Path(os.environ.get(VARIABLE, "runs"))


def runs_folders(named: Path | None = None) -> list[Path]:
    """Return the folders in which runs are looked for, the default one first.

    They are the default one, and those that runs started from this working directory have used.
    named: only this one.
    """
    if named is not None:
        return [named]
    default = default_folder()
    others = [path for path in map(Path, _noted()) if path.is_dir()]
    own = default.resolve()
    return [default, *(Path(short_path(path)) for path in others if path.resolve() != own)]


def existing_folders(named: Path | None = None) -> list[Path]:
    """Return those of `runs_folders` that exist. Raises RunFolderError if none does."""
    folders = runs_folders(named)
    found = [folder for folder in folders if folder.is_dir()]
    if not found:
        raise RunFolderError(
            f"there is no folder {str(folders[0])!r}; {MAKES_FIRST_RUN}, and --runs-dir DIR names "
            "another folder of runs"
        )
    return found


def note_runs_folder(runs_dir: Path) -> None:
    """Note a folder in which a run starts, so that all commands find the run.

    Without a state folder it is not noted: `runs_folders` has only the default one then.
    """
    path = str(runs_dir.resolve())
    own_temporary = Path(tempfile.gettempdir(), "openenv-pipe-")  # removed when a command ends
    if path.startswith(str(own_temporary.resolve())):
        return
    if path in (str(default_folder().resolve()), *_noted()):
        return
    with suppress(OSError, NoKeyError):
        file = _file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with file.open("ab") as opened:
            # A single write of a line: two processes that append do not mix their lines.
            opened.write(os.fsencode(path) + b"\n")


def _noted() -> list[str]:
    try:
        return list(dict.fromkeys(os.fsdecode(_file().read_bytes()).splitlines()))
    except (OSError, NoKeyError):
        return []


def _file() -> Path:
    here = hashlib.sha256(os.fsencode(Path.cwd())).hexdigest()[:32]
    return key_path().parent / "runs_dirs" / here


def instead_of_run(path: Path) -> str:
    """Return what to name or do instead of a folder that is no run folder."""
    if (path / "latest").exists():
        return f"try {path / 'latest'}"
    if (path / "sweep.json").is_file():
        hint = "name one of its runs, or continue the sweep with"
        return f"{hint}: openenv-pipe train -m --resume {path}"
    if found := sorted((path / "episodes").glob("step_*")):
        what = f"it has episodes without their run{if_command('rescore', ', as rescore makes it')}"
        return f'{what}; in Python: openenv_pipe.runs.episodes.read_episodes("{found[0]}")'
    return "name one of its runs"
