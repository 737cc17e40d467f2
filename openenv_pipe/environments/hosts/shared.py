"""A host of servers that another process keeps for several runs (`borrow`): a sweep for its jobs.

Dead servers are the keeper's to start again, within the host's budget. Refused here: starting and
stopping servers, and going on with a session that was lost.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from pydantic import JsonValue

from openenv_pipe.config.schema import EnvConfig, ServingConfig
from openenv_pipe.config.schema.host import HostConfig
from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.hosts.pool import SessionPool
from openenv_pipe.errors import FailureError, HostError
from openenv_pipe.system.http import OPEN
from openenv_pipe.system.server_lease import Loan


class KeptHost:
    """See `hosts.base.Host`."""

    def __init__(self, env: EnvConfig, host: HostConfig, keeper: Path) -> None:
        """Borrows nothing yet. keeper: its socket."""
        self.capacity = host.num_servers * host.sessions_per_server
        self.access = OPEN
        self._wanted = ServingConfig(env=env, host=host)
        self._keeper = keeper
        self._loan: Loan | None = None
        self._follower: asyncio.Task[None] | None = None
        self._pool = SessionPool(env, host.sessions_per_server, OPEN)

    @property
    def urls(self) -> Sequence[str]:
        return self._pool.urls

    @property
    def num_deaths(self) -> int:
        """See `Host.num_deaths`."""
        return self._pool.num_removed

    def facts(self) -> dict[str, JsonValue]:
        """See `Host.facts`; `kept_servers` says that others had them before."""
        return self._loan.facts if self._loan is not None else {}

    async def start(self) -> None:
        """See `Host.start`."""
        request = {"serving": self._wanted.model_dump(mode="json")}
        try:
            self._loan = await Loan.ask(self._keeper, request)
            self._use(self._loan.urls)
            await self._pool.open_all(patience_s=self._wanted.env.reset_timeout_s)
        except BaseException as error:
            await self.close()
            if isinstance(error, FailureError):
                raise HostError(str(error)) from error
            raise
        self._follower = asyncio.create_task(self._follow(self._loan))

    def session(self) -> AbstractAsyncContextManager[Session]:
        return self._pool.lend()

    async def close(self) -> None:
        """Close the sessions, then give the servers back."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        await self._pool.close()
        if self._loan is not None:
            await self._loan.give_back()

    async def _follow(self, loan: Loan) -> None:
        """Use the servers that are up, until there are none any more."""
        try:
            while True:
                await loan.news()
                self._use(loan.urls)
        except FailureError as error:
            self._pool.fail(HostError(str(error)))

    def _use(self, urls: Sequence[str]) -> None:
        for url in set(self._pool.urls) - set(urls):
            self._pool.remove(url)
        for url in urls:
            if url not in self._pool.urls:
                self._pool.add(url)
