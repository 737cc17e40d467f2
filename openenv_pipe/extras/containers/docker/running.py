"""A container whose output is copied to a file and whose end is noticed, and its restrictions.

The output is read from the container itself, not from the daemon's log of it: the daemon deletes
the oldest file of a limited log even while it is read. So the daemon keeps no log, and a container
that writes faster than its output is copied waits.

Containers get no capabilities, no new privileges and no swap. Docker neither restarts them nor runs
health checks of its own, which would start a process in the container every few seconds.
"""

import asyncio
import math
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import docker
from docker.models.containers import Container
from docker.types import LogConfig
from docker.utils.socket import frames_iter

from openenv_pipe.extras.containers.docker.daemon import DaemonErrors, explained, in_thread, remove
from openenv_pipe.extras.containers.schema import DockerHostConfig, DockerSandboxConfig
from openenv_pipe.system.process import log_redactor

SOCKET_PROXY = Path(__file__).with_name("socket_proxy.py")
SHARED_FOLDER = "/run/openenv-pipe"  # in the container: the folder with the socket
END_LIMIT_S = 60.0  # time limit for the container's end after that of its output
FOLLOW_LIMIT_S = 5.0  # time limit for the rest of the output after the container's end


class RunningContainer:
    """A container that is started once. Several threads may use it."""

    def __init__(self, client: docker.DockerClient, log: Path, name: str) -> None:
        self.ended = asyncio.Event()
        self.state: Mapping[str, Any] = {}  # as Docker reports it, once the container has ended
        self.failure = ""  # why the container cannot be watched and therefore counts as ended
        self._client = client
        self._log = log
        self._name = f"openenv-pipe-{name}-{uuid.uuid4().hex[:12]}"
        self._container: Container | None = None
        self._follower: threading.Thread | None = None

    async def start(self, options: Mapping[str, Any]) -> None:
        """Create and start it. A cancellation waits for that. Raises one of DaemonErrors.

        options: keyword arguments of `containers.create`.
        """
        await in_thread(self._start, options, asyncio.get_running_loop())

    async def attributes(self) -> Mapping[str, Any]:
        assert self._container is not None
        await in_thread(self._container.reload)
        attributes: Mapping[str, Any] = self._container.attrs
        return attributes

    async def remove(self, grace_s: float) -> None:
        """End it, by SIGKILL if it has not ended `grace_s` after SIGTERM, and remove it.

        If the daemon does not remove it now, a later run or command does. May be called again.
        """
        container, self._container = self._container, None
        if container is not None:
            await in_thread(self._remove, container, grace_s)
        if self._follower is not None:
            await asyncio.to_thread(self._follower.join, FOLLOW_LIMIT_S)

    def _start(self, options: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        container = self._container = self._client.containers.create(name=self._name, **options)
        # Before the start, so that nothing is missed.
        output = container.attach_socket()
        self._follower = threading.Thread(
            target=self._follow,
            args=(container, output, loop),
            name=f"follow-{self._name}",
            daemon=True,
        )
        self._follower.start()
        container.start()

    def _follow(self, container: Container, output: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Copy the output until the container ends, then set `state` and `ended`.

        output: the socket that is attached to the container.
        """
        try:
            with self._log.open("ab", buffering=0) as file:
                redactor = log_redactor()
                for _, chunk in frames_iter(output, tty=False):
                    file.write(redactor.feed(chunk))
                file.write(redactor.end())
            # The output ends with the container. If only the connection has ended, this fails.
            container.wait(timeout=END_LIMIT_S)
            container.reload()
            self.state = container.attrs["State"]
        except Exception as error:  # a container that cannot be watched counts as dead
            self.failure = f"it cannot be watched: {explained(error)}"
        # The socket's own close leaves the connection open.
        output._response.close()
        with suppress(RuntimeError):  # the event loop is closed, so nothing waits for the end
            loop.call_soon_threadsafe(self.ended.set)

    def _remove(self, container: Container, grace_s: float) -> None:
        if not self.ended.is_set():
            with suppress(*DaemonErrors):
                container.stop(timeout=math.ceil(grace_s))
        with suppress(*DaemonErrors):
            remove(container)


def restrictions(config: DockerHostConfig | DockerSandboxConfig) -> dict[str, Any]:
    """Return the keyword arguments of `containers.create` that limit what a container may do."""
    return {
        "log_config": LogConfig(type="none"),
        "init": True,  # a PID 1 that forwards signals and reaps orphans
        "healthcheck": {"test": ["NONE"]},
        "mem_limit": f"{config.mem_limit_mb}m",
        "memswap_limit": f"{config.mem_limit_mb}m",
        "nano_cpus": round(config.cpus * 1e9),
        "pids_limit": config.pids_limit,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "read_only": config.read_only,
    }


def behind_proxy(source: str, target: str, command: list[str]) -> list[str]:
    """Return the command that runs `command` and forwards connections by `socket_proxy.py`."""
    return ["python3", "-I", "-S", "-c", SOCKET_PROXY.read_text(), source, target, *command]


def entry(command: list[str]) -> dict[str, Any]:
    """Return the keyword arguments of `containers.create` for a command in place of the image's."""
    return {"entrypoint": command[:1], "command": command[1:]}


def cause_of_death(state: Mapping[str, Any], mem_limit: str) -> str:
    """Describe why a container ended, from its `State` as Docker reports it.

    mem_limit: the key and the value of its memory limit.
    """
    cause = f"exit code {state['ExitCode']}"
    if state.get("OOMKilled"):
        cause += f", out of memory: {mem_limit}"
    return cause
