"""A folder, in memory where possible, through which the trainer passes weights to servers.

The run removes it at its end, and a guardian if the run is killed. If that is killed as well, the
user's next run removes the folder, or `openenv-pipe prune`.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.process_id import ProcessId

IN_MEMORY = Path("/dev/shm")
OWNER = "owner.json"
IDLE = ("tail", "-f", os.devnull)  # what the guardian runs: it only has to wait


@contextlib.contextmanager
def weights_folder(configured: str | None) -> Iterator[Path]:
    """Make a new folder in the configured one, or in memory if that is None.

    Raises:
        ConfigError: the configured folder cannot be written.
    """
    parent = parent_folder(configured)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for orphan in orphans(parent):
            shutil.rmtree(orphan, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=parent, prefix="run-"))
    except OSError as error:
        raise ConfigError(f"engine.weights_dir={configured!r} cannot be used: {error}") from error
    with _removed_at_the_end(folder):
        folder.chmod(0o755)  # servers in containers run as another user
        (folder / OWNER).write_text(ProcessId.of_this_process().model_dump_json())
        yield folder


@contextlib.contextmanager
def _removed_at_the_end(folder: Path) -> Iterator[None]:
    """Remove a folder at the end of the block, also if this process is killed in it."""
    guardian = None
    try:
        guardian = ManagedProcess(
            IDLE, log=Path(os.devnull), environment=os.environ, grace_s=0.0, scratch=folder
        )
        yield
    finally:
        if guardian is not None:
            guardian.stop(0.0)
        shutil.rmtree(folder, ignore_errors=True)


def parent_folder(configured: str | None) -> Path:
    """Return the folder of this user's weights folders."""
    if configured is not None:
        return Path(configured).expanduser().absolute()
    memory = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return memory / f"openenv-pipe-{os.getuid()}"


def orphans(parent: Path) -> list[Path]:
    """List the weights folders in `parent` whose run, on this machine, is dead."""
    found = []
    for owner in sorted(parent.glob(f"run-*/{OWNER}")):
        with contextlib.suppress(OSError, ValidationError):
            if not ProcessId.model_validate_json(owner.read_text()).alive:
                found.append(owner.parent)
    return found
