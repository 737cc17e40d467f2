"""Who works on a run folder: one process at a time, and nobody once it is gone.

The kernel holds the lock and lets go of it with the process, however that ends. On a file system
of several machines that knows such locks it holds between them too. Refuses to wait.
"""

import errno
import fcntl
import os
from pathlib import Path

from openenv_pipe.errors import RunFolderError

HELD = (errno.EACCES, errno.EAGAIN)


def hold(folder: Path) -> int:
    """Take the folder until this process ends; returns the descriptor that holds it.

    Raises RunFolderError if another process has it. A file system without locks lets everyone in.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            os.close(descriptor)
            raise RunFolderError(
                f"another process works on {folder}; wait for its end, or stop it with Ctrl-C"
            ) from None
    return descriptor
