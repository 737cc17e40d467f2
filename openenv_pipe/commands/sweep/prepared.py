"""The process from which this process forks the runs of its jobs, so that they import nothing.

A process that does jobs, which is the sweep's own or one of a launcher, starts it with its first
job and keeps it for the following ones. The first job waits for the imports, as it would for its
own. A run that needs other variables is started by itself. If the code on the disk has changed, a
new process imports it, because a run's record says which code it has run.
"""

import os
import socket
import sys
import threading
from collections.abc import Collection, Mapping

from openenv_pipe.runs.provenance import find_code_digest, find_versions
from openenv_pipe.system.fork_server import ForkServer, can_fork
from openenv_pipe.system.process_id import ProcessId

Code = tuple[str, dict[str, str]]  # digest of this tool's files, versions of packages
COMMAND = (sys.executable, "-m", "openenv_pipe.cli.job_server")

_lock = threading.Lock()  # A launcher may do jobs in several threads.
_process: tuple[ForkServer, Code] | None = None  # with what it imports


def prepared_process(
    environment: Mapping[str, str], other: Collection[str], sweep: ProcessId
) -> ForkServer | None:
    """Return the prepared process, which may still import; None if this run cannot be its fork.

    other: variables of `environment` that no import reads, and that are not in os.environ.
    sweep: its process. Processes of a launcher may outlive it, but the prepared one does not.
    """
    global _process
    if not can_fork():
        return None
    with _lock:
        code = find_code_digest(), find_versions()
        if _process is not None and _process[1] != code:
            _end()
        if _process is None:
            owner = sweep.pid if sweep.host == socket.gethostname() else None
            try:
                _process = ForkServer(COMMAND, os.environ, owner), code
            except OSError:  # no process or memory is left; the run finds out by itself
                return None
        server, _ = _process
        return server if server.fits(environment, other) else None


def end_prepared_process() -> None:
    """End the prepared process, if there is one. Its forks go on."""
    with _lock:
        _end()


def _end() -> None:
    global _process
    if _process is not None:
        _process[0].close()
        _process = None
