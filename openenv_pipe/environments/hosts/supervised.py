"""A host of servers that are watched and, when they die, started again.

`ProcessHost` and its like say how one server is started; this says when. Dead servers take their
sessions with them: the episodes on them end with SessionClosedError, and nothing is retried.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.hosts.base import Server
from openenv_pipe.environments.hosts.pool import SessionPool, side_by_side
from openenv_pipe.errors import FailureError, HostError
from openenv_pipe.system.http import OPEN, Access

if TYPE_CHECKING:
    from openenv_pipe.config.schema import EnvConfig


class SupervisedHost:
    """See `hosts.base.Host`."""

    def __init__(
        self,
        env: "EnvConfig",
        servers: Sequence[Server],
        *,
        sessions_per_server: int,
        max_restarts: int,
        access: Access = OPEN,
    ) -> None:
        """max_restarts counts those of all servers together, over the whole run."""
        self.capacity = len(servers) * sessions_per_server
        self.access = access
        self._env = env
        self._servers = servers
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._watchers: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None
        self._pool = SessionPool(env, sessions_per_server, access)

    @property
    def urls(self) -> Sequence[str]:
        return self._pool.urls

    @property
    def num_deaths(self) -> int:
        """See `Host.num_deaths`."""
        return self._pool.num_removed

    async def start(self) -> None:
        """Start all servers side by side, then open all sessions. See `Host.start`."""
        try:
            await side_by_side(server.start() for server in self._servers)
            for server in self._servers:
                self._pool.add(server.url)
            await self._open_all()
        except BaseException:
            await self.close()
            raise
        self._watchers = [asyncio.create_task(self._watch(server)) for server in self._servers]

    async def _open_all(self) -> None:
        """All sessions. Why a server cannot make its environment, it may have said in its log."""
        try:
            await self._pool.open_all()
        except HostError as error:
            raise HostError(str(error), self._servers[0].log) from error

    def session(self) -> AbstractAsyncContextManager[Session]:
        return self._pool.lend()

    @property
    def failure(self) -> FailureError | None:
        """Why the host has failed for good; None while it has not."""
        return self._pool.failure

    async def clear(self) -> None:
        """Hold no session, so that others may open as many, and see that nobody else holds any.

        A server gives up the sessions of a dead client only when their steps end, so it is asked
        for a while. Raises HostError if they are still not all free then.
        """
        await self._pool.close_idle()
        await self._pool.open_all(patience_s=self._env.reset_timeout_s)
        await self._pool.close_idle()

    async def close(self) -> None:
        """See `Host.close`. Goes on in the background if the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self._pool.close()
        await asyncio.gather(*(server.stop() for server in self._servers))

    async def _watch(self, server: Server) -> None:
        """Replace a server each time it dies; fail the host when that is no longer allowed."""
        try:
            while True:
                url = server.url
                cause = await server.died()
                self._pool.remove(url)
                died = f"env {self._env.name!r}: the server at {url} died ({cause})"
                await self._revive(server, HostError(died, server.log))
                self._pool.add(server.url)
        except FailureError as error:
            self._pool.fail(error)
        except Exception as error:  # or those who wait for a session would wait for ever
            self._pool.fail(HostError(f"env {self._env.name!r}: cannot be watched: {error!r}"))
            raise

    async def _revive(self, server: Server, error: FailureError) -> None:
        """Start a dead server again. Raises HostError when the restarts are used up."""
        while self._num_restarts < self._max_restarts:
            self._num_restarts += 1
            try:
                await server.stop()
                await server.start()
                return
            except FailureError as failed_start:
                error = failed_start
        raise HostError(f"host.max_restarts={self._max_restarts} are used up: {error}") from error
