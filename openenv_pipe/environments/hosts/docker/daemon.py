"""The Docker daemon of this machine: its client, its errors in words, and what runs left in it.

Every container of ours carries the process that it belongs to, as a label, and so a later command
can tell which of them have lost it. Refused here: a daemon on another machine, and removing what
is not ours, or may still have its owner.
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

OWNER = "openenv-pipe.owner"  # ProcessId, as JSON
LOGS = "openenv-pipe.logs"  # the folder of the run's logs
ANSWER_LIMIT_S = 60
DEFAULT_ADDRESS = "unix:///var/run/docker.sock"
CONFLICT = 409  # the daemon is busy removing it for somebody else
DaemonErrors = (DockerException, OSError)  # those of its HTTP library are OSErrors


@dataclass(frozen=True, slots=True)
class Owned:
    """A container that some run started."""

    container: Container
    owner: ProcessId
    logs: str


def daemon_address() -> str:
    """Where the daemon listens. Raises ConfigError if that is not on this machine."""
    address = os.environ.get("DOCKER_HOST") or DEFAULT_ADDRESS
    if not address.startswith("unix://"):
        raise ConfigError(
            f"DOCKER_HOST={address!r} is not a daemon of this machine, and servers are reached "
            "through its own sockets; unset it, or set host=process"
        )
    return address


def connect() -> docker.DockerClient:
    """A client of a daemon that answers. Blocks. Raises HostError or ConfigError."""
    address = daemon_address()
    try:
        with socket.socket(socket.AF_UNIX) as trial:  # whose errors have types
            trial.settimeout(ANSWER_LIMIT_S)
            trial.connect(address.removeprefix("unix://"))
        client = docker.DockerClient(base_url=address, timeout=ANSWER_LIMIT_S)
        client.ping()
    except DaemonErrors as error:
        advice = "start it (systemctl start docker), or set DOCKER_HOST to where it listens"
        if isinstance(error, PermissionError):
            advice = "add yourself to the group `docker`, and log in again"
        raise HostError(
            f"no Docker daemon answers at {address}: {error}; {advice}; host=process needs none"
        ) from error
    return client


@contextmanager
def connected() -> Iterator[docker.DockerClient]:
    """A client for some calls. What the daemon refuses meanwhile becomes a HostError. Blocks."""
    client = connect()
    try:
        yield client
    except DaemonErrors as error:
        raise refusal(error) from error
    finally:
        client.close()


def refusal(error: Exception) -> HostError:
    """For what the daemon does not do, where it is not a container's fault."""
    return HostError(f"the Docker daemon at {daemon_address()} refuses: {explained(error)}")


def explained(error: Exception) -> str:
    """What the daemon says, without HTTP."""
    return str(error.explanation) if isinstance(error, APIError) else str(error)


async def in_thread(function: Callable[..., Result], *args: Any) -> Result:
    """Run a blocking call. A cancellation waits for its end: what it made has to be known."""
    call = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.gather(call, return_exceptions=True)
        raise


def owned_containers(client: docker.DockerClient) -> list[Owned]:
    """All containers, running or not, that carry our label; damaged labels are passed over."""
    found = []
    for container in client.containers.list(
        all=True, filters={"label": OWNER}, ignore_removed=True
    ):
        with suppress(ValueError):
            owner = ProcessId.model_validate_json(container.labels[OWNER])
            found.append(Owned(container, owner, container.labels.get(LOGS, "")))
    return found


def remove_orphans(client: docker.DockerClient) -> list[Owned]:
    """Remove the containers whose owner was a process of this machine and is gone."""
    orphans = [owned for owned in owned_containers(client) if not owned.owner.alive]
    for orphan in orphans:
        remove(orphan.container)
    return orphans


def remove(container: Container) -> None:
    """Kill and remove. It may be gone, or on its way, already."""
    try:
        container.remove(force=True, v=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != CONFLICT:
            raise
