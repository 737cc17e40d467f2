"""Forward a unix socket of this user to a port of a pod, through the cluster's API.

Each connection is one WebSocket of the API's port-forward, with two channels: data and errors.
The Kubernetes client's own port-forward is not used, because it needs a thread per connection and
select(), which is limited to 1024 file descriptors. A broken connection is not reopened, so that
its user notices.
"""

import asyncio
import shutil
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import aiohttp

from openenv_pipe.extras.containers.kubernetes.api import Cluster
from openenv_pipe.system.files import socket_folder

CHUNK = 64 * 1024
DATA, ERRORS = 0, 1  # channels, the first byte of every message
CONNECT_LIMIT_S = 15.0


class Tunnel:
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
