"""A host that watches its servers and restarts them when they die.

`ProcessHost` and others implement how one server is started (`system/supervisor.py`). The episodes
of a dead server's sessions end with SessionClosedError, and nothing is retried.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.hosts.pool import SessionPool
from openenv_pipe.errors import HostError, PipeError
from openenv_pipe.system.http import OPEN, Access
from openenv_pipe.system.supervisor import Restart, RestartableServer, Supervisor
from openenv_pipe.system.tasks import run_all

if TYPE_CHECKING:
    from openenv_pipe.config.schema import EnvConfig

_log = logging.getLogger(__name__)


class SupervisedHost:
    """A `hosts.base.Host` of `RestartableServer`s."""

    def __init__(
        self,
        env: "EnvConfig",
        servers: Sequence[RestartableServer],
        *,
        sessions_per_server: int,
        restart: Restart,
        access: Access = OPEN,
    ) -> None:
        """restart: restarts a dead server, see `Supervisor`."""
        self.capacity = len(servers) * sessions_per_server
        self.access = access
        self.key: str | None = None  # that of `access`, if this host has made one
        self._env = env
        self._servers = servers
        self._closing: asyncio.Task[None] | None = None
        self._pool = SessionPool(env, sessions_per_server, access)
        self._supervisors = [
            Supervisor(
                server,
                restart,
                name=f"env {env.name!r}: the server",
                error_type=HostError,
                on_down=self._pool.remove,
                on_up=self._pool.add,
                on_failure=self._pool.fail,
            )
            for server in servers
        ]

    @property
    def urls(self) -> Sequence[str]:
        return self._pool.urls

    @property
    def num_deaths(self) -> int:
        return self._pool.num_removed

    async def start(self) -> None:
        """Start all servers at the same time, then open all sessions. See `Host.start`."""
        try:
            await self._prepare()
            await run_all(server.start() for server in self._servers)
            for server in self._servers:
                self._pool.add(server.url)
            await self._open_all()
        except BaseException:
            await self.close()
            raise
        for supervisor in self._supervisors:
            supervisor.watch()
        _log.info("env %r: started the servers %s", self._env.name, ", ".join(self.urls))

    async def _prepare(self) -> None:
        """Do what hosts of a kind have to do before their servers start."""

    async def _open_all(self) -> None:
        """Open all sessions. An error quotes a server's log, which may name the reason.

        The servers end first, because their log is complete only then.
        """
        try:
            await self._pool.open_all()
        except HostError as error:
            await self.close()
            raise HostError(str(error), self._servers[0].log) from error

    def session(self) -> AbstractAsyncContextManager[Session]:
        return self._pool.lend()

    @property
    def failure(self) -> PipeError | None:
        """The error after which the host lends no more sessions; None before."""
        return self._pool.failure

    async def clear(self) -> None:
        """Close all sessions, and make sure that no other client holds one.

        A server frees the sessions of a dead client only when their steps end, so the attempt is
        repeated for `env.reset_timeout_s`.

        Raises HostError: some sessions are not free by then.
        """
        await self._pool.close_idle()
        await self._pool.open_all(patience_s=self._env.reset_timeout_s)
        await self._pool.close_idle()

    async def close(self) -> None:
        """See `Host.close`. Continues in the background if the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.gather(*(each.stop_watching() for each in self._supervisors))
        await self._pool.close()
        await asyncio.gather(*(server.stop() for server in self._servers))
        _log.info("env %r: stopped the servers", self._env.name)
