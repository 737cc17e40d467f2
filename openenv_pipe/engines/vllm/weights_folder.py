"""A folder, in memory where possible, through which the trainer passes weights to servers.

The run removes it at its end, or a guardian process does if the run is killed. If the guardian is
killed as well, the user's next run or `openenv-pipe prune` removes the folder.
"""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.files import naming
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.process_id import ProcessId

IN_MEMORY = Path("/dev/shm")
OWNER = "owner.json"
IDLE = ("tail", "-f", os.devnull)  # what the guardian runs: it only has to wait


@contextlib.contextmanager
def weights_folder(configured: str | None) -> Iterator[Path]:
    """Make a new folder, for this user only, in the configured one, or in memory if that is None.

    Raises:
        ConfigError: the configured folder cannot be written, or others can replace what is in it.
    """
    parent = parent_folder(configured)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _reject_open_to_others(parent)
        for orphan in orphans(parent):
            shutil.rmtree(orphan, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=_prefix()))  # mode 0700
    except OSError as error:
        raise ConfigError(
            f"engine.weights_dir={configured!r}: no folder can be made in {parent}: {error}; set "
            "it to a writable folder of yours"
        ) from error
    with _removed_at_the_end(folder):
        with naming(folder):
            (folder / OWNER).write_text(ProcessId.of_this_process().model_dump_json())
        yield folder


@contextlib.contextmanager
def full_as_config_error(configured: str | None) -> Iterator[None]:
    """Turn the error of a weights folder that is full into a ConfigError, which names the key.

    configured: the value of `engine.weights_dir`.
    """
    try:
        yield
    except OSError as error:
        parent = parent_folder(configured)
        is_of_weights = str(error.filename).startswith(str(parent / _prefix()))
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not is_of_weights:
            raise
        size_mb = shutil.disk_usage(parent).total / 2**20
        container = "; in a container, start it with a larger --shm-size"
        raise ConfigError(
            f"engine.weights_dir={configured or 'null'}: the weights for the servers do not fit "
            f"into {parent} ({size_mb:,.0f} MB): {error.strerror}; free space there, or set it to "
            f"a folder with more space{container if parent == IN_MEMORY.resolve() else ''}"
        ) from error


@contextlib.contextmanager
def _removed_at_the_end(folder: Path) -> Iterator[None]:
    """Remove a folder at the end of the block, even if this process is killed in the block."""
    guardian = None
    try:
        guardian = ManagedProcess(
            IDLE, log=Path(os.devnull), environment={}, grace_s=0.0, scratch=folder
        )
        yield
    finally:
        if guardian is not None:
            guardian.stop(0.0)
        shutil.rmtree(folder, ignore_errors=True)


def parent_folder(configured: str | None) -> Path:
    """Return the folder in which weights folders are made, without links in its path."""
    if configured is not None:
        return Path(configured).expanduser().resolve()
    memory = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return memory.resolve()


def orphans(parent: Path) -> list[Path]:
    """List this user's weights folders in `parent` whose run, on this machine, is dead."""
    found = []
    for folder in sorted(parent.glob(f"{_prefix()}*")):
        with contextlib.suppress(OSError, ValidationError):
            status = folder.lstat()  # in a shared place, others make folders and links too
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            if not ProcessId.model_validate_json((folder / OWNER).read_text()).alive:
                found.append(folder)
    return found


def _prefix() -> str:
    return f"openenv-pipe-{os.getuid()}-"


def _reject_open_to_others(parent: Path) -> None:
    """Raise ConfigError if another user could replace a folder of ours by one of their own."""
    status = parent.stat()
    is_shared = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in (0, os.getuid()):
        problem = f"it belongs to user {status.st_uid}"
    elif is_shared:
        problem = f"every user can rename what is in it (mode {stat.S_IMODE(status.st_mode):04o})"
    else:
        return
    raise ConfigError(
        f"weights are not written into {parent}: {problem}; set engine.weights_dir to a folder "
        "of yours"
    )
