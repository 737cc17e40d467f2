"""The sessions of one host: opened once, lent to one episode after another.

Every server has a fixed number of slots. A borrower gets a slot of the server with the most free
slots, and with it an idle session, or a new one if none is idle. A session is reused only if its
environment owes no answer. Any other session is closed, and its slot opens a new one later.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from openenv_pipe.environments.client.session import Session
from openenv_pipe.errors import (
    HostError,
    PipeError,
    ServerFullError,
    SessionError,
    StepRejectedError,
)
from openenv_pipe.system.http import Access

if TYPE_CHECKING:
    from openenv_pipe.config.schema import EnvConfig

FIRST_RETRY_S = 0.02
LONGEST_RETRY_S = 1.0


@dataclass(eq=False, slots=True)
class Slots:
    """The sessions of one server."""

    url: str
    num_free: int
    idle: deque[Session] = field(default_factory=deque)  # at most num_free; lent in turn
    lent: set[Session] = field(default_factory=set)


class SessionPool:
    """Lends sessions of several servers, each of which allows `sessions_per_server`."""

    def __init__(self, env: "EnvConfig", sessions_per_server: int, access: Access) -> None:
        self._env = env
        self._sessions_per_server = sessions_per_server
        self.access = access
        self.num_removed = 0  # servers removed so far
        self._servers: dict[str, Slots] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._closings: set[asyncio.Task[None]] = set()
        self.failure: PipeError | None = None  # that every request for a session raises

    @property
    def urls(self) -> list[str]:
        return list(self._servers)

    def add(self, url: str) -> None:
        """Lend sessions of this server too, which are opened when they are needed."""
        self._servers[url] = Slots(url, self._sessions_per_server)
        self._wake(self._sessions_per_server)

    def remove(self, url: str) -> None:
        """Stop lending sessions of this server, and close its open ones."""
        slots = self._servers.pop(url, None)
        if slots is not None:
            self.num_removed += 1
            self._discard(*slots.idle, *slots.lent)

    def fail(self, error: PipeError) -> None:
        """Stop lending: every present and later request for a session raises `error`."""
        self.failure = self.failure or error
        self._wake(len(self._waiters))

    async def open_all(self, patience_s: float = 0.0) -> None:
        """Open every session of every server, which proves that the servers allow so many.

        Args:
            patience_s: how long a server may be full, for example because it is still closing
                another client's sessions.

        Raises:
            HostError: the servers accept fewer sessions; the message names the keys to change.
        """
        deadline = time.monotonic() + patience_s
        while (full := await self._open_free_slots()) is not None:
            error = self._too_few()
            if time.monotonic() >= deadline:
                raise error from full
            await self.close_idle()
            await asyncio.sleep(FIRST_RETRY_S)

    async def _open_free_slots(self) -> ServerFullError | None:
        """Open a session in every free slot. Return the error of a full server, if there is one."""

        async def open_one(slots: Slots) -> None:
            slots.idle.append(await open_session(self._env, slots.url, self.access))

        every = [open_one(slots) for slots in self._servers.values() for _ in range(slots.num_free)]
        results = await asyncio.gather(*every, return_exceptions=True)
        full = None
        for error in results:  # any other error is raised before one of a full server is returned
            if isinstance(error, ServerFullError):
                full = full or error
            elif error is not None:
                raise HostError(f"env {self._env.name!r}: no session opens: {error}") from error
        return full

    async def close_idle(self) -> None:
        for slots in self._servers.values():
            self._discard(*slots.idle)
            slots.idle.clear()
        await asyncio.gather(*self._closings, return_exceptions=True)

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Session]:
        """See `Host.session`."""
        slots, session = await self._acquire()
        try:
            yield session
        finally:
            slots.lent.discard(session)
            if session.usable and self._servers.get(slots.url) is slots:
                slots.idle.append(session)
            else:
                self._discard(session)
                # A server that died loses its connections one after another.
                for other in (*slots.idle, *slots.lent):
                    other.doubt()
            self._free_slot(slots)

    async def close(self) -> None:
        """Close all sessions, including lent ones, at the same time."""
        self.fail(HostError(f"host of env {self._env.name!r} is closed"))
        for url in self.urls:
            self.remove(url)
        await asyncio.gather(*self._closings, return_exceptions=True)

    async def _acquire(self) -> tuple[Slots, Session]:
        """Return a slot and a usable session.

        A server that rejects a session is asked again for `env.reset_timeout_s`: it may still be
        busy with a step that was given up, or have died and be about to be replaced.
        """
        deadline: float | None = None
        retry_s = FIRST_RETRY_S
        while True:
            slots = await self._take_slot()
            try:
                session = await self._idle_session(slots)
                if session is None:
                    session = await open_session(self._env, slots.url, self.access)
                slots.lent.add(session)
                return slots, session
            except SessionError:
                self._free_slot(slots)
                deadline = deadline or time.monotonic() + self._env.reset_timeout_s
                if time.monotonic() > deadline:
                    raise
            except BaseException:
                self._free_slot(slots)
                raise
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)

    async def _take_slot(self) -> Slots:
        """Wait for a free slot. Raises the failure of the host."""
        while True:
            if self.failure is not None:
                raise self.failure.with_traceback(None)
            slots = max(self._servers.values(), key=lambda each: each.num_free, default=None)
            if slots is not None and slots.num_free > 0:
                slots.num_free -= 1
                return slots
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake(1)  # pass on the slot that was meant for this task
                raise

    def _free_slot(self, slots: Slots) -> None:
        slots.num_free += 1
        self._wake(1)

    def _wake(self, num_waiters: int) -> None:
        while num_waiters > 0 and self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                num_waiters -= 1

    async def _idle_session(self, slots: Slots) -> Session | None:
        """Return an idle session on which the server still answers; None if there is none.

        The question costs a round trip for a session that was idle for a while. It saves episodes
        from starting on a connection that the server has closed or lost meanwhile.
        """
        while slots.idle:
            session = slots.idle.popleft()
            responsive = False
            try:
                responsive = await session.is_responsive(self._env.reset_timeout_s)
            finally:
                if not responsive:
                    self._discard(session)
            if responsive:
                return session
        return None

    def _discard(self, *sessions: Session) -> None:
        for session in sessions:
            task = asyncio.get_running_loop().create_task(session.close())
            self._closings.add(task)
            task.add_done_callback(self._closings.discard)

    def _too_few(self) -> HostError:
        fewest = min(len(slots.idle) for slots in self._servers.values())
        wanted = self._sessions_per_server
        noun = "session" if fewest == 1 else "sessions"
        return HostError(
            f"env {self._env.name!r} accepted {fewest} {noun} on one server but "
            f"host.sessions_per_server={wanted}; set host.sessions_per_server={max(fewest, 1)} and "
            "a larger host.num_servers, or raise max_concurrent_envs=... of create_app in the "
            "environment's server/app.py (this program sets the variable MAX_CONCURRENT_ENVS for "
            "it) and set SUPPORTS_CONCURRENT_SESSIONS = True in its class"
        )


async def open_session(env: "EnvConfig", url: str, access: Access) -> Session:
    """Open a session, and make sure that the server has accepted it. Raises SessionError."""
    session = await Session.connect(
        url, timeout_s=env.reset_timeout_s, max_message_mb=env.max_message_mb, access=access
    )
    try:
        # A full server accepts every connection, and rejects the first message.
        await session.state(env.reset_timeout_s)
    except StepRejectedError:
        pass  # the environment has no state before a reset, but the session exists
    except BaseException:
        await session.close()
        raise
    return session
