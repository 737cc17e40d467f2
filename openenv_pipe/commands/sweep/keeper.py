"""Keeps servers between the jobs of a sweep that need the same ones: environments' and engines'.

A job borrows servers (`borrow`) and has them for itself until it ends, however it does. Then they
are cleared of what it left: every session of an environment is opened once, which shows that the
server lives and holds none; an engine loses adapters and its prefix cache. The next job gets them.
Servers that fail this, or have died for good, are ended, and the next job gets new ones. All of
them belong to this process, and end with it.

Refused here: servers shared by two jobs at a time, and those that nobody here starts.
"""

import asyncio
import json
import shutil
import tempfile
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
from openenv_pipe.system.files import digest_of_bytes
from openenv_pipe.system.resources import find_env
from openenv_pipe.system.server_lease import LONGEST_LINE

SOCKET = "keeper"
POLL_S = 0.05
# Servers of so many other needs may wait for their next job when new ones start; those that rested
# longest end. Engines take what memory there is.
MOST_IDLE = {"serving": 4, "vllm": 0}
NAMES = {"serving": "environment", "vllm": "vllm"}
# Keys of `env` that say nothing of its servers; all others do, and those to come.
OF_EPISODES = {
    *("adapter", "tasks", "baselines", "success_reward", "step_timeout_s", "step_exception"),
    *("max_turns", "max_reply_tokens", "max_episode_tokens"),
}


class Keepable(Protocol):
    """What the keeper asks of servers: a supervised host is one."""

    @property
    def urls(self) -> Sequence[str]:
        """Those that are up."""

    @property
    def failure(self) -> FailureError | None:
        """Why they are down for good."""

    def facts(self) -> Mapping[str, JsonValue]:
        """For the records of the runs."""

    async def start(self) -> None:
        """Return when they answer. Raises FailureError."""

    async def clear(self) -> None:
        """Make them ready for another run. Raises FailureError."""

    async def close(self) -> None:
        """End them. Bounded; may be called again."""


@dataclass(eq=False, slots=True)
class Kept:
    """Servers, and who has them."""

    kind: str
    key: str
    servers: Keepable
    logs: Path
    lent: bool = True
    num_jobs: int = 1
    clearing: asyncio.Task[None] | None = None  # after the last job


class Keeper:
    """Lends servers to jobs of this machine. Lives on one event loop."""

    def __init__(self, logs: Path) -> None:
        """Starts nothing yet. Each host's logs go into a numbered folder below `logs`."""
        self.num_starts: Counter[str] = Counter()  # by kind, as the next
        self.num_borrowed: Counter[str] = Counter()
        self._logs = logs
        self._folder = Path(tempfile.mkdtemp(prefix="openenv-pipe-"))  # for our user alone
        self._kept: list[Kept] = []  # the one that rested longest first
        self._jobs: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._closing = False

    @property
    def socket(self) -> Path:
        """Where jobs ask for servers."""
        return self._folder / SOCKET

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._serve, self.socket, limit=LONGEST_LINE)

    async def close(self) -> None:
        """End all servers. Bounded, as a host's close is."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for task in self._jobs:
            task.cancel()
        clearings = [kept.clearing for kept in self._kept if kept.clearing is not None]
        await asyncio.gather(*self._jobs, *clearings, return_exceptions=True)
        await asyncio.gather(*(self._end(kept) for kept in list(self._kept)))
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._jobs.add(task)
        try:
            with suppress(ConnectionError, asyncio.CancelledError):  # the job or all is over
                await self._attend(reader, writer)
        finally:
            self._jobs.discard(task)
            writer.close()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One job, from its request to its end."""
        line = await reader.readline()
        if not line:
            return
        try:
            ((kind, wanted),) = json.loads(line).items()
            kept = await self._borrow(kind, wanted)
        except (PipeError, OSError) as error:
            await _tell(writer, {"error": str(error)})
            return
        try:
            await self._follow(kept, reader, writer)
        finally:
            self._take_back(kept)

    async def _follow(
        self, kept: Kept, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Tell the job where its servers are, each time that changes, until it ends."""
        facts = kept.servers.facts() | {
            "kept_servers": {"num_jobs_before": kept.num_jobs - 1, "logs": str(kept.logs)}
        }
        over = asyncio.ensure_future(reader.read())
        told: list[str] | None = None
        try:
            while not over.done():
                if kept.servers.failure is not None:
                    await _tell(writer, {"error": str(kept.servers.failure)})
                    return
                urls = list(kept.servers.urls)
                if urls != told and (urls or told):  # a job begins with a server that is up
                    await _tell(writer, {"urls": urls, "facts": facts})
                    told = urls
                await asyncio.wait({over}, timeout=POLL_S)
        finally:
            over.cancel()

    async def _borrow(self, kind: str, wanted: Mapping[str, Any]) -> Kept:
        """Servers that nobody has, started if there are none. Raises PipeError."""
        key = await asyncio.to_thread(server_key, kind, wanted)
        self.num_borrowed[kind] += 1
        while True:
            kept = next((each for each in self._kept if each.key == key and not each.lent), None)
            if kept is None:
                return await self._start(kind, key, wanted)
            kept.lent = True
            if kept.clearing is not None:
                await kept.clearing
            if kept in self._kept:
                kept.num_jobs += 1
                return kept

    def _take_back(self, kept: Kept) -> None:
        """The next job may have it as soon as it is cleared."""
        if self._closing:
            return
        kept.lent = False
        kept.clearing = asyncio.create_task(self._clear(kept))
        self._kept.remove(kept)
        self._kept.append(kept)

    async def _start(self, kind: str, key: str, wanted: Mapping[str, Any]) -> Kept:
        while len(idle := self._idle(kind)) > MOST_IDLE[kind]:  # others borrow while one ends
            await self._end(idle[0])
        self.num_starts[kind] += 1
        logs = self._logs / f"{NAMES[kind]}_{self.num_starts[kind]}"
        logs.mkdir(parents=True)
        kept = Kept(kind=kind, key=key, servers=_build(kind, wanted, logs), logs=logs)
        self._kept.append(kept)
        try:
            await kept.servers.start()
            await kept.servers.clear()
        except BaseException:
            await self._end(kept)
            raise
        return kept

    def _idle(self, kind: str) -> list[Kept]:
        return [each for each in self._kept if each.kind == kind and not each.lent]

    async def _clear(self, kept: Kept) -> None:
        """Make servers ready for their next job, or end them if they cannot be."""
        try:
            if kept.servers.failure is not None:
                raise kept.servers.failure
            await kept.servers.clear()
        except FailureError:
            await self._end(kept)

    async def _end(self, kept: Kept) -> None:
        if kept in self._kept:
            self._kept.remove(kept)
        await kept.servers.close()


def server_key(kind: str, wanted: Mapping[str, Any]) -> str:
    """Equal for what the same servers can serve: code or model, command, variables, limits.

    Raises ConfigError for an env.package that is not there.
    """
    if kind == "vllm":
        plan = {**wanted["plan"], "model": wanted["model"]}  # where its files are says nothing
        told: dict[str, Any] = {**wanted, "plan": plan}
    else:
        env = {key: value for key, value in wanted["env"].items() if key not in OF_EPISODES}
        code = code_digest(find_env(env["package"])) if env["package"] else None
        told = {"env": env, "host": wanted["host"], "code": code}
    return digest_of_bytes(json.dumps([kind, told], sort_keys=True).encode())


def _build(kind: str, wanted: Mapping[str, Any], logs: Path) -> Keepable:
    """Raises ConfigError if it cannot be started this way."""
    if kind == "vllm":
        from openenv_pipe.engines.vllm.shared_server import KeptServer  # brings its HTTP library

        return KeptServer(wanted, logs)
    host = build_host(ServingConfig.model_validate(wanted), logs)
    assert isinstance(host, SupervisedHost), "who starts servers watches them"
    return host


async def _tell(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()
