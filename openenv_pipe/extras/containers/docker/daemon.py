"""The Docker daemon of this machine: its client, its error messages, and containers of dead runs.

Every container of a run has a label that names the run's process, so that a later command can
remove it if that process is dead. No other container is ever removed. A daemon on another machine
is not supported.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import docker
from docker.errors import APIError, DockerException, NotFound
from docker.models.containers import Container

from openenv_pipe.errors import ConfigError, HostError
from openenv_pipe.system.process_id import ProcessId

Result = TypeVar("Result")

OWNER = "openenv-pipe.owner"  # start_guard.owner_label
LOGS = "openenv-pipe.logs"  # the folder of the run's logs
ANSWER_LIMIT_S = 60
NUM_CONNECTIONS = 1024  # that are kept for later requests; each running container takes one
DEFAULT_ADDRESS = "unix:///var/run/docker.sock"
CONFLICT = 409  # the status of a removal while the daemon is removing the container already
DaemonErrors = (DockerException, OSError)  # those of its HTTP library are OSErrors


@dataclass(frozen=True, slots=True)
class Owned:
    container: Container
    owner: ProcessId


def daemon_address() -> str:
    """Return the daemon's address. Raises ConfigError if it is not a socket of this machine."""
    address = os.environ.get("DOCKER_HOST") or DEFAULT_ADDRESS
    if not address.startswith("unix://"):
        raise ConfigError(
            f"DOCKER_HOST={address!r} is not a socket of this machine, through which the servers "
            "are reached; unset DOCKER_HOST, or set host=process"
        )
    return address


def connect() -> docker.DockerClient:
    """Connect to the daemon. Blocks. Raises HostError and ConfigError."""
    address = daemon_address()
    try:
        with socket.socket(socket.AF_UNIX) as trial:  # its errors have types, the SDK's do not
            trial.settimeout(ANSWER_LIMIT_S)
            trial.connect(address.removeprefix("unix://"))
        client = docker.DockerClient(
            base_url=address, timeout=ANSWER_LIMIT_S, max_pool_size=NUM_CONNECTIONS
        )
        client.ping()
    except DaemonErrors as error:
        advice = "start it (systemctl start docker), or set DOCKER_HOST to its address"
        if isinstance(error, PermissionError):
            advice = "add your user to the group `docker` and log in again"
        raise HostError(
            f"no Docker daemon answers at {address}: {error}; {advice}; host=process needs none"
        ) from error
    return client


@contextmanager
def connected() -> Iterator[docker.DockerClient]:
    """Yield a client, and turn errors of the daemon inside the block into HostError. Blocks."""
    client = connect()
    try:
        yield client
    except DaemonErrors as error:
        raise rejection(error) from error
    finally:
        client.close()


def rejection(error: Exception) -> HostError:
    return HostError(f"the Docker daemon at {daemon_address()} rejects a call: {explained(error)}")


def explained(error: Exception) -> str:
    """Return the daemon's own message, without the HTTP status."""
    return str(error.explanation) if isinstance(error, APIError) else str(error)


async def in_thread(function: Callable[..., Result], *args: Any) -> Result:
    """Run a blocking call in a thread. A cancellation waits for its end."""
    call = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.gather(call, return_exceptions=True)
        raise


def owned_containers(client: docker.DockerClient) -> list[Owned]:
    """Return all containers of runs, running or not. Those with unreadable labels are skipped."""
    found = []
    for container in client.containers.list(
        all=True, filters={"label": OWNER}, ignore_removed=True
    ):
        with suppress(ValueError):
            owner = ProcessId.model_validate_json(container.labels[OWNER])
            found.append(Owned(container, owner))
    return found


def orphans(client: docker.DockerClient) -> list[Owned]:
    """Return the containers whose owner, a process of this machine, is dead."""
    return [owned for owned in owned_containers(client) if not owned.owner.alive]


def remove_orphans(client: docker.DockerClient) -> None:
    for orphan in orphans(client):
        remove(orphan.container)


def remove(container: Container) -> None:
    """Kill and remove a container, which may be gone or about to be removed."""
    try:
        container.remove(force=True, v=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != CONFLICT:
            raise
