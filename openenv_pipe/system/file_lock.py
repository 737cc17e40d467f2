"""Locks that let one process at a time work in a folder, or make a file.

The kernel releases the lock at the latest when the process ends, however that happens. On a shared
file system that supports such locks it also excludes processes of other machines.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openenv_pipe.errors import RunFolderError

HELD = (errno.EACCES, errno.EAGAIN)


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed; return False if another process has it.

    On a file system without locks every process succeeds.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in HELD
    return True


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder while the block runs.

    Does not wait. On a file system without locks every process succeeds.

    Raises RunFolderError: Another process holds the lock.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not try_lock(descriptor):
            raise RunFolderError(
                f"another process works in {folder}; wait for it to end, or stop it with Ctrl-C"
            )
        yield
    finally:
        os.close(descriptor)
