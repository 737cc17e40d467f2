"""Servers that the runs of this process share, one run at a time: `sharing` provides them to runs.

`SharedServers` owns those of environments: it starts them, restarts dead ones within
`host.max_restarts`, and stops them. A `LeasedHost` has a lease of them. `kept_vllm` owns vLLM's.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from anyio.from_thread import BlockingPortal, start_blocking_portal
from pydantic import JsonValue

from openenv_pipe.config.schema import EnvConfig, HostConfig, RunConfig, ServingConfig
from openenv_pipe.engines.vllm.launch import VllmServer
from openenv_pipe.engines.vllm.servers import ManagedLaunch
from openenv_pipe.environments.build import build_host
from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.hosts.package import code_digest
from openenv_pipe.environments.hosts.pool import SessionPool
from openenv_pipe.environments.hosts.supervised import SupervisedHost
from openenv_pipe.errors import FailureError, HostError, PipeError
from openenv_pipe.extras.sweeps.kept_vllm import KeptProcesses, new_log_folder
from openenv_pipe.pipeline.servers import OwnServers, ServerProvider
from openenv_pipe.system.files import digest_of_bytes
from openenv_pipe.system.http import OPEN, Access, bearer
from openenv_pipe.system.resources import find_env

# How many idle sets of servers stay for a later job when a new set is started; those that were idle
# longest are stopped first.
MAX_IDLE = 4
# Keys of `env` that have no effect on its servers. Every other key, also a future one, has.
CLIENT_KEYS = {
    *("adapter", "tasks", "baselines", "success_reward", "step_timeout_s", "step_exception"),
    *("max_turns", "max_reply_tokens", "max_episode_tokens", "max_observation_tokens", "metrics"),
}
POLL_S = 0.05


class ShareableServers(Host, Protocol):
    """Servers that can be cleared between two jobs. `SupervisedHost` is one implementation."""

    @property
    def failure(self) -> PipeError | None:
        """The error that ended the servers for good; None while they work."""

    @property
    def key(self) -> str | None:
        """The secret that every request to them needs and no record contains; None: none."""

    async def clear(self) -> None:
        """Remove what a job left behind. Raises FailureError."""


@dataclass(eq=False, slots=True)
class ServerSet:
    """Servers that are leased together, and their state, which any thread may read."""

    key: str  # see `server_key`
    servers: ShareableServers
    logs: Path
    is_leased: bool = True
    num_jobs: int = 1  # that have leased it so far
    clearing: asyncio.Task[None] | None = None  # after the last job

    def facts(self) -> dict[str, JsonValue]:
        """See `Host.facts`. `shared_servers` counts the jobs that used these servers before."""
        shared: JsonValue = {"num_jobs_before": self.num_jobs - 1, "logs": str(self.logs)}
        return {**self.servers.facts(), "shared_servers": shared}


class SharedServers:
    """Starts, leases, clears and stops servers, on one event loop in a thread of its own.

    A job has its servers to itself until it ends. They are then cleared of what it left behind:
    every session is opened once, which shows that the server answers and that all its sessions are
    free. The next job with the same needs gets them. Servers that cannot be cleared or have failed
    for good are stopped, and the next job gets new ones. All of them end with the worker.
    """

    def __init__(self, logs: Path, report: Callable[..., None]) -> None:
        self._logs = logs
        self._report = report
        self._sets: list[ServerSet] = []  # the one that was idle longest comes first

    async def close(self) -> None:
        clearings = [each.clearing for each in self._sets if each.clearing is not None]
        await asyncio.gather(*clearings, return_exceptions=True)
        await asyncio.gather(*(self._stop(each) for each in list(self._sets)))

    async def lease(self, wanted: Mapping[str, Any]) -> ServerSet:
        key = await asyncio.to_thread(server_key, wanted)
        while True:
            idle = (each for each in self._sets if each.key == key and not each.is_leased)
            found = next(idle, None)
            if found is None:
                return await self._start(key, wanted)
            found.is_leased = True
            try:
                if found.clearing is not None:
                    await asyncio.shield(found.clearing)
            except asyncio.CancelledError:
                found.is_leased = False
                raise
            if found in self._sets:  # else it could not be cleared
                found.num_jobs += 1
                self._report("lease", "environment", False)
                return found

    def take_back(self, leased: ServerSet) -> None:
        """Make the set available to the next job, which waits until it is cleared."""
        leased.is_leased = False
        leased.clearing = asyncio.create_task(self._clear(leased))
        self._sets.remove(leased)
        self._sets.append(leased)

    async def _start(self, key: str, wanted: Mapping[str, Any]) -> ServerSet:
        # Others may lease while one stops.
        while len(idle := [each for each in self._sets if not each.is_leased]) > MAX_IDLE:
            await self._stop(idle[0])
        self._report("lease", "environment", True)
        logs = new_log_folder(self._logs, "environment")
        started = ServerSet(key=key, servers=_build(wanted, logs), logs=logs)
        self._sets.append(started)
        try:
            await started.servers.start()
            await started.servers.clear()
        except BaseException:
            await self._stop(started)
            raise
        return started

    async def _clear(self, idle: ServerSet) -> None:
        """Clear a set for its next job, or stop it if that fails."""
        try:
            if idle.servers.failure is not None:
                raise idle.servers.failure
            await idle.servers.clear()
        except FailureError:
            await self._stop(idle)

    async def _stop(self, stopped: ServerSet) -> None:
        if stopped in self._sets:
            self._sets.remove(stopped)
        await stopped.servers.close()


def server_key(wanted: Mapping[str, Any]) -> str:
    """Return a digest that is equal for requests that the same servers can serve.

    It covers the code, command, variables and limits. Raises ConfigError.
    """
    env = {key: value for key, value in wanted["env"].items() if key not in CLIENT_KEYS}
    code = code_digest(find_env(env["package"])) if env["package"] else None
    described = {"env": env, "host": wanted["host"], "code": code}
    return digest_of_bytes(json.dumps(described, sort_keys=True).encode())


def _build(wanted: Mapping[str, Any], logs: Path) -> ShareableServers:
    host = build_host(ServingConfig.model_validate(wanted), logs)
    assert isinstance(host, SupervisedHost), "only hosts that start servers are leased"
    return host


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
    def __init__(
        self, env: EnvConfig, host: HostConfig, portal: BlockingPortal, shared: SharedServers
    ) -> None:
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
