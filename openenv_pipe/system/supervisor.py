"""Supervision of servers: notice the death of a server, and restart it within a budget."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from openenv_pipe.errors import FailureError, PipeError

_log = logging.getLogger(__name__)


class RestartableServer(Protocol):
    """One server that can be started again after its death."""

    @property
    def url(self) -> str:
        """Where it listens, http://host:port or unix:///path. May change with every start."""

    @property
    def log(self) -> Path | None:
        """The file with its output; None if it cannot be read from here."""

    async def start(self) -> None:
        """Start it and return when it is ready.

        Raises PipeError: it did not become ready, and nothing is left running.
        """

    async def died(self) -> str:
        """Return when it is dead, with the cause in words, such as 'exit code 1'."""

    async def stop(self) -> None:
        """Stop it, whether it lives, is dead, or was never started. Bounded; may be repeated."""


Restart = Callable[[RestartableServer, FailureError], Coroutine[Any, Any, None]]


@dataclass(eq=False, slots=True)
class RestartBudget:
    """A number of restarts, over the whole run, for all servers that share the budget."""

    limit: int
    key: str  # of the configuration, which sets `limit`
    notify: Callable[[str], None] = _log.warning  # called with each restart
    num_used: int = field(default=0, init=False)

    async def restart(self, server: RestartableServer, error: FailureError) -> None:
        """Stop and start a server until a start succeeds.

        Args:
            error: says how the server died. A start that raises its type is tried again.

        Raises:
            FailureError: of the type of `error`, when the budget is used up.
        """
        error_type = type(error)
        while self.num_used < self.limit:
            self.num_used += 1
            cause = str(error).partition("\n")[0]
            self.notify(f"{cause}; restart {self.num_used} of {self.limit}")
            try:
                await server.stop()
                await server.start()
                return
            except error_type as failed_start:
                error = failed_start
        raise error_type(f"{self.key}={self.limit} are used up: {error}") from error


@dataclass(eq=False, slots=True)
class Supervisor:
    """Watches one running server and has it restarted each time it dies."""

    server: RestartableServer
    restart: Restart  # brings a dead server back, or raises; such as `RestartBudget.restart`
    _: KW_ONLY
    name: str  # what error messages call the server
    error_type: type[FailureError]  # of the errors that are made here
    on_down: Callable[[str], None]  # called with the URL of a server that has died
    on_up: Callable[[str], None]  # called with the URL of a server that was restarted
    on_failure: Callable[[PipeError], None]  # called when there will be no server any more
    _watcher: asyncio.Task[None] | None = field(default=None, init=False)

    def watch(self) -> None:
        """Begin to watch the server, which is running."""
        self._watcher = asyncio.create_task(self._watch())

    async def stop_watching(self) -> None:
        """Stop watching the server, and leave it as it is. May be called again."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    async def _watch(self) -> None:
        try:
            while True:
                url = self.server.url
                cause = await self.server.died()
                self.on_down(url)
                died = f"{self.name} at {url} died ({cause})"
                await self.restart(self.server, self.error_type(died, self.server.log))
                self.on_up(self.server.url)
        except PipeError as error:
            self.on_failure(error)
        except Exception as error:  # reported, or whoever waits for the server would wait forever
            self.on_failure(self.error_type(f"{self.name} cannot be watched: {error!r}"))
            raise
