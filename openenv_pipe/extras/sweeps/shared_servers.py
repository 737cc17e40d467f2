"""Shares the servers of environments among the jobs of a worker.

They run on an event loop in a thread of its own. A job leases them and has them to itself until it
ends. They are then cleared of what the job left behind: every session is opened once, which shows
that the server answers and that all its sessions are free. The next job with the same needs gets
them. Servers that cannot be cleared or have failed for good are stopped, and the next job gets new
ones. All of them end with the worker.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import JsonValue

from openenv_pipe.config.schema import ServingConfig
from openenv_pipe.environments.build import build_host
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.hosts.package import code_digest
from openenv_pipe.environments.hosts.supervised import SupervisedHost
from openenv_pipe.errors import FailureError, PipeError
from openenv_pipe.system.files import digest_of_bytes
from openenv_pipe.system.resources import find_env

# How many idle sets of servers stay for a later job when a new set is started; those that were idle
# longest are stopped first.
MAX_IDLE = 4
# Keys of `env` that have no effect on its servers. Every other key, also a future one, has.
CLIENT_KEYS = {
    *("adapter", "tasks", "baselines", "success_reward", "step_timeout_s", "step_exception"),
    *("max_turns", "max_reply_tokens", "max_episode_tokens", "max_observation_tokens", "metrics"),
}


class ShareableServers(Host, Protocol):
    """Servers that can be cleared between two jobs. `SupervisedHost` is one implementation."""

    @property
    def failure(self) -> PipeError | None:
        """The error that ended the servers for good; None while they work."""

    @property
    def key(self) -> str | None:
        """What every request to them needs, and no record has; None: nothing."""

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
    """Starts, leases, clears and stops servers, on one event loop."""

    def __init__(self, logs: Path, report: Callable[..., None]) -> None:
        self._logs = logs
        self._report = report
        self._sets: list[ServerSet] = []  # the one that was idle longest comes first

    async def close(self) -> None:
        clearings = [each.clearing for each in self._sets if each.clearing is not None]
        await asyncio.gather(*clearings, return_exceptions=True)
        await asyncio.gather(*(self._stop(each) for each in list(self._sets)))

    async def lease(self, wanted: Mapping[str, Any]) -> ServerSet:
        """Lease an idle set that fits, or start one. Raises PipeError."""
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
        while len(idle := self._idle()) > MAX_IDLE:  # others may lease while one stops
            await self._stop(idle[0])
        self._report("lease", "environment", True)
        logs = self._new_folder()
        started = ServerSet(key=key, servers=_build(wanted, logs), logs=logs)
        self._sets.append(started)
        try:
            await started.servers.start()
            await started.servers.clear()
        except BaseException:
            await self._stop(started)
            raise
        return started

    def _new_folder(self) -> Path:
        """Make a folder for logs. Workers before this one may have made some."""
        self._logs.mkdir(parents=True, exist_ok=True)
        logs = self._logs / f"environment_{len(list(self._logs.glob('environment_*'))) + 1}"
        logs.mkdir()
        return logs

    def _idle(self) -> list[ServerSet]:
        return [each for each in self._sets if not each.is_leased]

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
