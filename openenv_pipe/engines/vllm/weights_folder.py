"""A folder, in memory where possible, through which the trainer passes weights to servers.

The run removes it at its end. The folder of a killed run is removed by the user's next run.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.process_id import ProcessId

IN_MEMORY = Path("/dev/shm")
OWNER = "owner.json"


@contextlib.contextmanager
def weights_folder(configured: str | None) -> Iterator[Path]:
    """Make a new folder in the configured one, or in memory if that is None.

    Raises:
        ConfigError: the configured folder cannot be written.
    """
    parent = _parent(configured)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_orphans(parent)
        folder = Path(tempfile.mkdtemp(dir=parent, prefix="run-"))
    except OSError as error:
        raise ConfigError(f"engine.weights_dir={configured!r} cannot be used: {error}") from error
    try:
        folder.chmod(0o755)  # servers in containers run as another user
        (folder / OWNER).write_text(ProcessId.of_this_process().model_dump_json())
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _parent(configured: str | None) -> Path:
    if configured is not None:
        return Path(configured).expanduser().absolute()
    memory = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return memory / f"openenv-pipe-{os.getuid()}"


def _remove_orphans(parent: Path) -> None:
    for owner in parent.glob(f"run-*/{OWNER}"):
        with contextlib.suppress(OSError, ValidationError):
            if not ProcessId.model_validate_json(owner.read_text()).alive:
                shutil.rmtree(owner.parent, ignore_errors=True)
