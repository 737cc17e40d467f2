"""Shares servers among the jobs of a sweep: those of environments, and vLLM's.

A job leases servers (`system/server_lease.py`) and has them to itself until its process ends. They
are then cleared of what the job left behind: every session of an environment is opened once, which
shows that the server answers and that all its sessions are free; a vLLM server drops its adapters
and its prefix cache. The next job with the same needs gets them. Servers that cannot be cleared or
have failed for good are stopped, and the next job gets new ones. All of them belong to the sweep's
process and end with it.
"""

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import JsonValue

from openenv_pipe.config.schema import ServingConfig
from openenv_pipe.environments.build import build_host
from openenv_pipe.environments.hosts.package import code_digest
from openenv_pipe.environments.hosts.supervised import SupervisedHost
from openenv_pipe.errors import FailureError, PipeError
from openenv_pipe.system.files import digest_of_bytes, socket_folder
from openenv_pipe.system.resources import find_env
from openenv_pipe.system.server_lease import MAX_LINE_BYTES

SOCKET = "servers"
POLL_S = 0.05
# How many idle sets of servers, per kind, stay for a later job when a new set is started; those
# that were idle longest are stopped first. vLLM servers take all memory that there is.
MAX_IDLE = {"serving": 4, "vllm": 0}
NAMES = {"serving": "environment", "vllm": "vllm"}
# Keys of `env` that have no effect on its servers. Every other key, also a future one, has.
CLIENT_KEYS = {
    *("adapter", "tasks", "baselines", "success_reward", "step_timeout_s", "step_exception"),
    *("max_turns", "max_reply_tokens", "max_episode_tokens", "max_observation_tokens", "metrics"),
}


class ShareableServers(Protocol):
    """Servers that can be cleared between two jobs. `SupervisedHost` is one implementation."""

    @property
    def urls(self) -> Sequence[str]:
        """URLs of the servers that are up."""

    @property
    def failure(self) -> PipeError | None:
        """The error that ended the servers for good; None while they work."""

    def facts(self) -> Mapping[str, JsonValue]:
        """Facts about the servers for the records of the runs."""

    async def start(self) -> None:
        """Start the servers and return when they answer. Raises FailureError."""

    async def clear(self) -> None:
        """Remove what a job left behind. Raises FailureError."""

    async def close(self) -> None:
        """Stop the servers. Bounded; may be called again."""


@dataclass(eq=False, slots=True)
class ServerSet:
    """Servers that are leased together, and their state."""

    kind: str  # "serving" or "vllm"
    key: str  # see `server_key`
    servers: ShareableServers
    logs: Path
    is_leased: bool = True
    num_jobs: int = 1  # that have leased it so far
    clearing: asyncio.Task[None] | None = None  # after the last job


class SharedServers:
    """Starts, leases, clears and stops servers for jobs on this machine, on one event loop."""

    def __init__(self, logs: Path) -> None:
        """Start nothing yet. The logs of each set go into a numbered folder below `logs`."""
        self.num_starts: Counter[str] = Counter()  # by kind
        self.num_leases: Counter[str] = Counter()  # by kind
        self._logs = logs
        self._folder = socket_folder("openenv-pipe-")
        self._sets: list[ServerSet] = []  # the one that was idle longest comes first
        self._jobs: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._closing = False

    @property
    def socket(self) -> Path:
        """The unix socket at which jobs acquire leases."""
        return self._folder / SOCKET

    async def start(self) -> None:
        """Accept jobs."""
        self._listener = await asyncio.start_unix_server(
            self._accept, self.socket, limit=MAX_LINE_BYTES
        )

    async def close(self) -> None:
        """Stop all servers. Bounded, as each set's `close` is."""
        self._closing = True
        if self._listener is not None:
            self._listener.close()
        for task in self._jobs:
            task.cancel()
        clearings = [each.clearing for each in self._sets if each.clearing is not None]
        await asyncio.gather(*self._jobs, *clearings, return_exceptions=True)
        await asyncio.gather(*(self._stop(each) for each in list(self._sets)))
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._jobs.add(task)
        try:
            with suppress(ConnectionError, asyncio.CancelledError):  # the job, or the sweep, ended
                await self._serve(reader, writer)
        finally:
            self._jobs.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one job from its request to its end."""
        line = await reader.readline()
        if not line:
            return
        try:
            ((kind, wanted),) = json.loads(line).items()
            leased = await self._lease(kind, wanted)
        except (PipeError, OSError) as error:
            await _send(writer, {"error": str(error)})
            return
        try:
            await self._send_changes(leased, reader, writer)
        finally:
            self._take_back(leased)

    async def _send_changes(
        self, leased: ServerSet, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send the servers' URLs to the job each time they change, until the job ends."""
        shared = {"num_jobs_before": leased.num_jobs - 1, "logs": str(leased.logs)}
        facts = {**leased.servers.facts(), "shared_servers": shared}
        job_end = asyncio.ensure_future(reader.read())
        sent: list[str] | None = None
        try:
            while not job_end.done():
                if leased.servers.failure is not None:
                    await _send(writer, {"error": str(leased.servers.failure)})
                    return
                urls = list(leased.servers.urls)
                if urls != sent and (urls or sent):  # the first message names a server that is up
                    await _send(writer, {"urls": urls, "facts": facts})
                    sent = urls
                await asyncio.wait({job_end}, timeout=POLL_S)
        finally:
            job_end.cancel()

    async def _lease(self, kind: str, wanted: Mapping[str, Any]) -> ServerSet:
        """Lease an idle set that fits, or start one. Raises PipeError."""
        key = await asyncio.to_thread(server_key, kind, wanted)
        self.num_leases[kind] += 1
        while True:
            idle = (each for each in self._sets if each.key == key and not each.is_leased)
            found = next(idle, None)
            if found is None:
                return await self._start(kind, key, wanted)
            found.is_leased = True
            if found.clearing is not None:
                await found.clearing
            if found in self._sets:  # else it could not be cleared
                found.num_jobs += 1
                return found

    def _take_back(self, leased: ServerSet) -> None:
        """Make the set available to the next job, which waits until it is cleared."""
        if self._closing:
            return
        leased.is_leased = False
        leased.clearing = asyncio.create_task(self._clear(leased))
        self._sets.remove(leased)
        self._sets.append(leased)

    async def _start(self, kind: str, key: str, wanted: Mapping[str, Any]) -> ServerSet:
        while len(idle := self._idle(kind)) > MAX_IDLE[kind]:  # others may lease while one stops
            await self._stop(idle[0])
        self.num_starts[kind] += 1
        logs = self._logs / f"{NAMES[kind]}_{self.num_starts[kind]}"
        logs.mkdir(parents=True)
        started = ServerSet(kind=kind, key=key, servers=_build(kind, wanted, logs), logs=logs)
        self._sets.append(started)
        try:
            await started.servers.start()
            await started.servers.clear()
        except BaseException:
            await self._stop(started)
            raise
        return started

    def _idle(self, kind: str) -> list[ServerSet]:
        return [each for each in self._sets if each.kind == kind and not each.is_leased]

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


def server_key(kind: str, wanted: Mapping[str, Any]) -> str:
    """Return a digest that is equal for requests that the same servers can serve.

    It covers the code or the model, command, variables and limits.

    Raises:
        ConfigError: there is no package `env.package`.
    """
    if kind == "vllm":
        # The digest of the model's content counts, and not the folder that a run has it in.
        spec = {**wanted["spec"], "model": wanted["model"]}
        described: dict[str, Any] = {**wanted, "spec": spec}
    else:
        env = {key: value for key, value in wanted["env"].items() if key not in CLIENT_KEYS}
        code = code_digest(find_env(env["package"])) if env["package"] else None
        described = {"env": env, "host": wanted["host"], "code": code}
    return digest_of_bytes(json.dumps([kind, described], sort_keys=True).encode())


def _build(kind: str, wanted: Mapping[str, Any], logs: Path) -> ShareableServers:
    """Raises ConfigError if the servers cannot be started as wanted."""
    if kind == "vllm":
        from openenv_pipe.engines.vllm.shared_server import SharedVllmServer

        return SharedVllmServer(wanted, logs)
    host = build_host(ServingConfig.model_validate(wanted), logs)
    assert isinstance(host, SupervisedHost), "only hosts that start servers are leased"
    return host


async def _send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()
