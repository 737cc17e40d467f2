"""Starts the guard process that removes a run's containers when the run ends or dies."""

import asyncio
import os
import sys
import time
from pathlib import Path

from openenv_pipe.environments.hosts.docker import guard as docker_guard
from openenv_pipe.errors import HostError
from openenv_pipe.system.process import ManagedProcess

POLL_S = 0.02
GUARD_LIMIT_S = 30.0  # for the start of the guard, and for the removal of all containers


def start_guard(owner: str, folder: Path, log: Path) -> ManagedProcess:
    """Start the guard of the containers whose label `daemon.OWNER` is `owner`.

    Args:
        folder: removed by the guard in the end.
    """
    return ManagedProcess(
        [sys.executable, "-m", docker_guard.__name__, owner, str(folder)],
        log=log,
        environment=os.environ,
        grace_s=GUARD_LIMIT_S,
    )


async def wait_for_guard(guard: ManagedProcess, folder: Path) -> None:
    """Return when the guard is ready; before that it would not notice our death.

    Raises:
        HostError: it is not ready within `GUARD_LIMIT_S`. It is stopped.
    """
    deadline = time.monotonic() + GUARD_LIMIT_S
    while not (folder / docker_guard.READY).exists():
        if not guard.alive or time.monotonic() > deadline:
            await guard.stopped(0.0)
            raise HostError("the process that would remove containers does not start", guard.log)
        await asyncio.sleep(POLL_S)
