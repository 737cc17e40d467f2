"""A host whose servers several runs of this process share, one run at a time.

`shared_servers` owns the servers: it starts them, restarts dead ones within `host.max_restarts`,
and stops them.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from pydantic import JsonValue

from openenv_pipe.config.schema import EnvConfig, HostConfig, ServingConfig
from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.hosts.pool import SessionPool
from openenv_pipe.errors import FailureError, HostError, PipeError
from openenv_pipe.system.http import OPEN, Access, bearer

POLL_S = 0.05


class ServerLease(Protocol):
    """Servers that a run has to itself until it releases them. They run on another event loop."""

    @property
    def urls(self) -> Sequence[str]:
        """URLs of the servers that are up; a restarted server may have another one."""

    @property
    def failure(self) -> PipeError | None:
        """The error that ended the servers for good; None while they work."""

    @property
    def key(self) -> str | None:
        """What every request to them needs, and no record has; None: nothing."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts about the servers."""

    def release(self) -> None:
        """Let the next run have the servers."""


class Lessor(Protocol):
    """Owns servers, and leases them."""

    async def lease(self, wanted: Mapping[str, Any]) -> ServerLease:
        """Wait for servers that fit `wanted`.

        Raises:
            PipeError: They do not start.
        """


class LeasedHost:
    """A `hosts.base.Host` that leases its servers."""

    def __init__(self, env: EnvConfig, host: HostConfig, lessor: Lessor) -> None:
        """Create the host; `start` takes the lease."""
        self.capacity = host.capacity
        self.access: Access = OPEN  # until the servers are there
        self._wanted = ServingConfig(env=env, host=host)
        self._lessor = lessor
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
        return dict(self._lease.facts) if self._lease is not None else {}

    async def start(self) -> None:
        try:
            wanted = self._wanted.model_dump(mode="json")
            self._lease = await self._lessor.lease(wanted)
            self.access = self._pool.access = bearer(self._lease.key)
            while not self._update(self._lease):  # A dead server is being restarted.
                await asyncio.sleep(POLL_S)
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
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    async def _follow(self, lease: ServerLease) -> None:
        """Keep the pool's servers equal to the lease's until they have failed."""
        try:
            while True:
                await asyncio.sleep(POLL_S)
                self._update(lease)
        except FailureError as error:
            self._pool.fail(HostError(str(error)))

    def _update(self, lease: ServerLease) -> bool:
        """Use the servers that are up; False if none is. Raises the error of failed servers."""
        if lease.failure is not None:
            raise lease.failure
        urls = lease.urls
        for url in set(self._pool.urls) - set(urls):
            self._pool.remove(url)
        for url in urls:
            if url not in self._pool.urls:
                self._pool.add(url)
        return bool(urls)
