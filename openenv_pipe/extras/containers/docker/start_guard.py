"""Start the guard process, which removes a run's containers when the run ends or dies."""

import asyncio
import json
import os
import sys
import time
import uuid
from pathlib import Path

from openenv_pipe.errors import HostError
from openenv_pipe.extras.containers.docker import guard as docker_guard
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.process_id import ProcessId

POLL_S = 0.02
GUARD_LIMIT_S = 30.0  # for the start of the guard, and for the removal of all containers


def owner_label() -> str:
    """Return a label for the containers of one guard: this process's ProcessId and a name, as JSON.

    The name keeps another guard of this process from removing them.
    """
    owner = ProcessId.of_this_process().model_dump()
    return json.dumps({**owner, "name": uuid.uuid4().hex[:12]})


def start_guard(owner: str, folder: Path, log: Path) -> ManagedProcess:
    """Start the guard of the containers whose label `daemon.OWNER` is `owner`.

    folder: the folder of sockets, which the guard removes at its end.
    """
    return ManagedProcess(
        [sys.executable, "-m", docker_guard.__name__, owner, str(folder)],
        log=log,
        environment=os.environ,
        grace_s=GUARD_LIMIT_S,
    )


async def wait_for_guard(guard: ManagedProcess, folder: Path) -> None:
    """Wait until the guard is ready to notice the death of this process. Raises HostError."""
    deadline = time.monotonic() + GUARD_LIMIT_S
    while not (folder / docker_guard.READY).exists():
        if not guard.alive or time.monotonic() > deadline:
            await guard.stopped(0.0)
            raise HostError("the guard process of the containers has not started", guard.log)
        await asyncio.sleep(POLL_S)
