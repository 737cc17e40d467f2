"""Servers that the runs of this process share, one run at a time: `sharing` provides them to runs.

`shared_servers` owns those of environments: it starts them, restarts dead ones within
`host.max_restarts`, and stops them. A `LeasedHost` has a lease of them. `kept_vllm` owns vLLM's.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

from anyio.from_thread import BlockingPortal, start_blocking_portal
from pydantic import JsonValue

from openenv_pipe.config.schema import EnvConfig, HostConfig, RunConfig, ServingConfig
from openenv_pipe.engines.vllm.launch import VllmServer
from openenv_pipe.engines.vllm.servers import ManagedLaunch
from openenv_pipe.environments.build import build_host
from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.hosts.pool import SessionPool
from openenv_pipe.errors import FailureError, HostError
from openenv_pipe.extras.sweeps.kept_vllm import KeptProcesses
from openenv_pipe.extras.sweeps.shared_servers import ServerSet, SharedServers
from openenv_pipe.pipeline.servers import OwnServers, ServerProvider
from openenv_pipe.system.http import OPEN, Access, bearer

POLL_S = 0.05


@contextmanager
def sharing(logs: Path | None, report: Callable[..., None]) -> Iterator[ServerProvider]:
    """Share servers among the runs of the block, and stop them with the block.

    logs: the logs of each set go into a folder below it; None: each run has servers of its own.
    report: called with "lease", the kind of the servers, and whether they had to be started.
    """
    if logs is None:
        yield OwnServers()
        return
    with start_blocking_portal() as portal:
        shared = SharedServers(logs, report)
        kept = KeptProcesses(logs, lambda is_new: report("lease", "vllm", is_new))
        try:
            yield LeasedServers(portal, shared, kept)
        finally:
            portal.call(kept.close)
            portal.call(shared.close)


class LeasedServers:
    """Servers that several runs of this process share, one run at a time."""

    def __init__(self, portal: BlockingPortal, shared: SharedServers, kept: KeptProcesses) -> None:
        """portal: of the event loop of the environments' servers. kept: the vLLM servers."""
        self._portal = portal
        self._shared = shared
        self._kept = kept

    def host(self, config: RunConfig, logs: Path) -> Host:
        """See `ServerProvider.host`. A host that starts no servers is not leased."""
        if not config.host.starts_servers:
            return build_host(config, logs)
        return LeasedHost(config.env, config.host, self._portal, self._shared)

    async def vllm_processes(self, launch: ManagedLaunch) -> list[VllmServer]:
        return await self._kept.servers(launch)


class LeasedHost:
    """A `hosts.base.Host` that leases its servers."""

    def __init__(
        self, env: EnvConfig, host: HostConfig, portal: BlockingPortal, shared: SharedServers
    ) -> None:
        """Create the host; `start` takes the lease."""
        self.capacity = host.capacity
        self.access: Access = OPEN  # until the servers are there
        self._wanted = ServingConfig(env=env, host=host)
        self._portal = portal
        self._shared = shared
        self._leased: ServerSet | None = None
        self._follower: asyncio.Task[None] | None = None
        self._pool = SessionPool(env, host.sessions_per_server, OPEN)

    @property
    def urls(self) -> Sequence[str]:
        return self._pool.urls

    @property
    def num_deaths(self) -> int:
        return self._pool.num_removed

    def facts(self) -> dict[str, JsonValue]:
        return self._leased.facts() if self._leased is not None else {}

    async def start(self) -> None:
        try:
            leased = await self._take_lease()
            self.access = self._pool.access = bearer(leased.servers.key)
            while not self._update(leased):  # A dead server is being restarted.
                await asyncio.sleep(POLL_S)
            await self._pool.open_all(patience_s=self._wanted.env.reset_timeout_s)
        except BaseException as error:
            await self.close()
            if isinstance(error, FailureError):
                raise HostError(str(error)) from error
            raise
        self._follower = asyncio.create_task(self._follow(leased))

    async def _take_lease(self) -> ServerSet:
        """Wait for servers that fit, which `close` releases, also after a cancellation."""
        wanted = self._wanted.model_dump(mode="json")
        leasing = self._portal.start_task_soon(self._shared.lease, wanted)
        try:
            self._leased = leased = await asyncio.wrap_future(leasing)
        except asyncio.CancelledError:
            if leasing.done() and not leasing.cancelled() and leasing.exception() is None:
                self._leased = leasing.result()
            raise
        return leased

    def session(self) -> AbstractAsyncContextManager[Session]:
        return self._pool.lend()

    async def close(self) -> None:
        """Close the sessions, then release the servers."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        await self._pool.close()
        leased, self._leased = self._leased, None
        if leased is not None:
            self._portal.start_task_soon(self._shared.take_back, leased)

    async def _follow(self, leased: ServerSet) -> None:
        """Keep the pool's servers equal to the lease's until they have failed."""
        try:
            while True:
                await asyncio.sleep(POLL_S)
                self._update(leased)
        except FailureError as error:
            self._pool.fail(HostError(str(error)))

    def _update(self, leased: ServerSet) -> bool:
        """Use the servers that are up; False if none is. Raises the error of failed servers."""
        if leased.servers.failure is not None:
            raise leased.servers.failure
        urls = list(leased.servers.urls)
        for url in set(self._pool.urls) - set(urls):
            self._pool.remove(url)
        for url in urls:
            if url not in self._pool.urls:
                self._pool.add(url)
        return bool(urls)
