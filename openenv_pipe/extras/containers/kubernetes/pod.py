"""One environment server in a pod: its start, its log and its death. Each start makes a new pod."""

import asyncio
import math
import shutil
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.errors import FailureError, HostError
from openenv_pipe.extras.containers.kubernetes.api import NOT_FOUND, Cluster, ClusterError, advice
from openenv_pipe.extras.containers.kubernetes.manifests import Manifest, pod, trouble
from openenv_pipe.extras.containers.schema import KubernetesHostConfig
from openenv_pipe.system.files import socket_folder
from openenv_pipe.system.process import log_redactor
from openenv_pipe.system.readiness import unless_dead, wait_until_healthy

CHUNK = 64 * 1024
DATA, ERRORS = 0, 1  # channels, the first byte of every message
CONNECT_LIMIT_S = 15.0
POLL_S = 1.0
API_OUTAGE_S = 60.0  # how long a pod counts as alive while the API does not answer
LOG_END_S = 2.0  # time limit for the rest of an ended pod's log


class Tunnel:
    """Forwards a unix socket of this user to a port of a pod, through the cluster's API.

    Each connection is one WebSocket of the API's port-forward, with two channels: data and errors.
    The Kubernetes client's own port-forward needs a thread per connection and select(), which is
    limited to 1024 file descriptors. A broken connection is not reopened: its user notices.
    """

    def __init__(self, cluster: Cluster, pod: str, port: int) -> None:
        self._cluster = cluster
        self._pod = pod
        self._port = port
        self._server: asyncio.Server | None = None
        self._folder: Path | None = None  # of the socket
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        self._folder = socket_folder("openenv-pipe-pod-")
        path = self._folder / "server"
        self._server = await asyncio.start_unix_server(self._accept, path, backlog=1024)
        return f"unix://{path}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(lambda _: writer.close())

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until either end, or the API, closes it."""
        async with AsyncExitStack() as stack:
            stack.enter_context(suppress(aiohttp.ClientError, OSError))  # the connection's own end
            async with asyncio.timeout(CONNECT_LIMIT_S):
                websocket = await stack.enter_async_context(
                    self._cluster.port_forward(self._pod, self._port)
                )
            directions = [
                asyncio.create_task(inward(reader, websocket)),
                asyncio.create_task(outward(websocket, writer)),
            ]
            try:
                await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for direction in directions:
                    direction.cancel()
                await asyncio.gather(*directions, return_exceptions=True)


async def inward(reader: asyncio.StreamReader, websocket: aiohttp.ClientWebSocketResponse) -> None:
    """Forward data from the local end to the pod until the local end closes."""
    while data := await reader.read(CHUNK):
        await websocket.send_bytes(bytes([DATA]) + data)


async def outward(websocket: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
    """Forward data from the pod until the pod closes the connection or reports an error.

    The first message of each channel is the port number, which is skipped.
    """
    begun: set[int] = set()
    async for message in websocket:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        if channel not in begun:
            begun.add(channel)
        elif channel == ERRORS:
            return
        else:
            writer.write(data)
            await writer.drain()


class EnvPod:
    """A `system.supervisor.RestartableServer`. Call `join` before `start`."""

    def __init__(self, env: EnvConfig, config: KubernetesHostConfig, index: int, log: Path) -> None:
        self.log = log
        self.url = ""
        self.image_id = ""  # with the image's digest, once the pod has started
        self._env = env
        self._config = config
        self._index = index
        self._num_starts = 0
        self._name = ""  # the pod's name; empty: there is no pod
        self._tunnel: Tunnel | None = None
        self._follower: asyncio.Task[None] | None = None

    def join(self, cluster: Cluster, owner: Manifest) -> None:
        """Set the cluster of the pods and the lease that owns them."""
        self._cluster = cluster
        self._owner = owner

    async def start(self) -> None:
        deadline = time.monotonic() + self._config.start_timeout_s
        name = f"{self._owner['name']}-{self._index}-{self._num_starts}"
        self._num_starts += 1
        manifest = pod(self._env, self._config, name=name, owner=self._owner, index=self._index)
        try:
            await self._cluster.create(manifest)
            self._name = name
            self._follower = asyncio.create_task(self._follow(name))
            await self._until_ready(deadline)
            self.url = await self._find_url()
            healthy = wait_until_healthy(self.url, timeout_s=deadline - time.monotonic())
            await unless_dead(healthy, self.died())
        except (FailureError, ClusterError) as error:
            await self.stop()
            text = f"env {self._env.name!r}, pod {name}: {error}"
            if isinstance(error, ClusterError):
                text += advice(error.status, self._config.namespace)
            raise HostError(text, self.log) from error
        except BaseException:
            await self.stop()
            raise

    async def died(self) -> str:
        answered, last = time.monotonic(), ClusterError(0, "")
        while time.monotonic() - answered < API_OUTAGE_S:
            try:
                cause, _ = trouble(await self._cluster.read_pod(self._name))
                answered = time.monotonic()
            except ClusterError as error:
                cause, last = "the pod was deleted" if error.status == NOT_FOUND else None, error
            if cause is not None:
                return cause
            await asyncio.sleep(POLL_S)
        if not last.status:
            return f"the cluster's API has not answered for {API_OUTAGE_S:g} s"
        more = advice(last.status, self._config.namespace)
        return f"the cluster's API has rejected all calls for {API_OUTAGE_S:g} s: {last}{more}"

    async def stop(self) -> None:
        """See `RestartableServer.stop`. A pod that cannot be deleted now goes with its lease."""
        if self._tunnel is not None:
            await self._tunnel.close()
        name, self._name = self._name, ""
        if name:
            with suppress(ClusterError):
                await self._cluster.delete_pod(name)
        if self._follower is not None:
            await asyncio.wait([self._follower], timeout=LOG_END_S)
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)

    async def _until_ready(self, deadline: float) -> None:
        """Wait for the pod's readiness probe, GET /health. Raises HostError, ClusterError."""
        while True:
            seen = await self._cluster.read_pod(self._name)
            cause, state = trouble(seen)
            if cause is not None:
                raise HostError(f"the server died before it was ready: {cause}")
            if is_ready(seen):
                self.image_id = seen["status"]["containerStatuses"][0].get("imageID", "")
                return
            if time.monotonic() > deadline:
                limit_s = self._config.start_timeout_s
                raise HostError(
                    f"/health did not answer within host.start_timeout_s={limit_s:g}; the pod is "
                    f"{state}"
                )
            await asyncio.sleep(POLL_S)

    async def _find_url(self) -> str:
        config = self._config
        if config.access == "cluster":
            service = f"{self._owner['name']}-{self._index}.{config.namespace}.svc"
            return f"http://{service}:{config.container_port}"
        self._tunnel = Tunnel(self._cluster, self._name, config.container_port)
        return await self._tunnel.open()

    async def _follow(self, name: str) -> None:
        """Copy the log until the pod ends. If a stream breaks, its last seconds may be repeated."""
        since_s = None
        with self.log.open("ab", buffering=0) as file:
            while True:
                ended_before = await self._has_ended(name)
                since_s = await self._copy_log(name, since_s, file)
                if ended_before or (since_s is not None and await self._has_ended(name)):
                    return
                await asyncio.sleep(POLL_S)

    async def _copy_log(self, name: str, since_s: int | None, file: BinaryIO) -> int | None:
        """Copy the log until the stream ends; return `since_s` for the next stream."""
        read = time.monotonic()
        redactor = log_redactor()
        try:
            async for chunk in self._cluster.log(name, since_s):
                file.write(redactor.feed(chunk))
                read = time.monotonic()
        except ClusterError:  # the container has not started, or the API does not answer now
            return since_s
        finally:
            file.write(redactor.end())
        return math.ceil(time.monotonic() - read + POLL_S) + 1

    async def _has_ended(self, name: str) -> bool:
        try:
            cause, _ = trouble(await self._cluster.read_pod(name))
        except ClusterError as error:
            return error.status == NOT_FOUND
        return cause is not None


def is_ready(pod_as_read: Mapping[str, Any]) -> bool:
    conditions = pod_as_read.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
