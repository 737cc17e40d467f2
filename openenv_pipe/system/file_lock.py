"""A lock that lets one process at a time work in a run folder.

The kernel holds the lock and releases it when the process ends, however that happens. On a shared
file system that supports such locks it also excludes processes of other machines.
"""

import errno
import fcntl
import os
from pathlib import Path

from openenv_pipe.errors import RunFolderError

HELD = (errno.EACCES, errno.EAGAIN)


def hold(folder: Path) -> int:
    """Lock the folder until this process ends; return the descriptor that holds the lock.

    Does not wait. On a file system without locks every process succeeds.

    Raises:
        RunFolderError: Another process holds the lock.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            os.close(descriptor)
            raise RunFolderError(
                f"another process works in {folder}; wait for it to end, or stop it with Ctrl-C"
            ) from None
    return descriptor
