"""A host whose servers belong to another process, which shares them among several runs.

A sweep shares servers among its jobs in this way (`commands/sweep/shared_servers.py`). The owner
starts the servers, restarts dead ones within `host.max_restarts`, and stops them.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from pydantic import JsonValue

from openenv_pipe.config.schema import EnvConfig, ServingConfig
from openenv_pipe.config.schema.host import SupervisedHostConfig
from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.hosts.pool import SessionPool
from openenv_pipe.errors import FailureError, HostError
from openenv_pipe.system.http import OPEN
from openenv_pipe.system.server_lease import ServerLease


class LeasedHost:
    """A `hosts.base.Host` that leases its servers."""

    def __init__(self, env: EnvConfig, host: SupervisedHostConfig, socket: Path) -> None:
        """Create the host; `start` acquires the lease from the owner at the unix socket."""
        self.capacity = host.capacity
        self.access = OPEN
        self._wanted = ServingConfig(env=env, host=host)
        self._socket = socket
        self._lease: ServerLease | None = None
        self._follower: asyncio.Task[None] | None = None
        self._pool = SessionPool(env, host.sessions_per_server, OPEN)

    @property
    def urls(self) -> Sequence[str]:
        return self._pool.urls

    @property
    def num_deaths(self) -> int:
        return self._pool.num_removed

    def facts(self) -> dict[str, JsonValue]:
        """See `Host.facts`. `shared_servers` counts the jobs that used these servers before."""
        return self._lease.facts if self._lease is not None else {}

    async def start(self) -> None:
        request = {"serving": self._wanted.model_dump(mode="json")}
        try:
            self._lease = await ServerLease.acquire(self._socket, request)
            self._use(self._lease.urls)
            await self._pool.open_all(patience_s=self._wanted.env.reset_timeout_s)
        except BaseException as error:
            await self.close()
            if isinstance(error, FailureError):
                raise HostError(str(error)) from error
            raise
        self._follower = asyncio.create_task(self._follow(self._lease))

    def session(self) -> AbstractAsyncContextManager[Session]:
        return self._pool.lend()

    async def close(self) -> None:
        """Close the sessions, then release the servers."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        await self._pool.close()
        if self._lease is not None:
            await self._lease.release()

    async def _follow(self, lease: ServerLease) -> None:
        """Keep the pool's servers equal to the lease's until the lease fails."""
        try:
            while True:
                await lease.wait_for_change()
                self._use(lease.urls)
        except FailureError as error:
            self._pool.fail(HostError(str(error)))

    def _use(self, urls: Sequence[str]) -> None:
        for url in set(self._pool.urls) - set(urls):
            self._pool.remove(url)
        for url in urls:
            if url not in self._pool.urls:
                self._pool.add(url)
