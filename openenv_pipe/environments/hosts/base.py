"""What the pipeline asks of a host, and what a host asks of its servers.

A `Host` owns the environment servers of a run and lends sessions with them. A `Server` is one
process or container; `hosts.supervised` makes a Host of several. Refused here: episodes, retries
of a step, knowledge of any one environment.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue

from openenv_pipe.environments.client.session import Session
from openenv_pipe.system.http import Access


class Host(Protocol):
    """Where the environments run."""

    @property
    def capacity(self) -> int:
        """Sessions that can be lent at the same time, over all servers."""
        ...

    @property
    def urls(self) -> Sequence[str]:
        """The servers that are up: see `Server.url`."""
        ...

    @property
    def num_deaths(self) -> int:
        """Servers that have died, or gone silent, so far."""
        ...

    @property
    def access(self) -> Access:
        """What every request to them has to carry."""
        ...

    async def start(self) -> None:
        """Start the servers and open every session once.

        Raises HostError or ConfigError, and leaves nothing behind.
        """
        ...

    def facts(self) -> dict[str, JsonValue]:
        """Once started: which code the servers run, as digests, for the run's record."""
        ...

    def session(self) -> AbstractAsyncContextManager[Session]:
        """Lend a usable session; wait for one if all are lent.

        The session may have played before: reset it first. Raises SessionError if none can be
        opened now, HostError once the host has failed for good or is closed.
        """
        ...

    async def close(self) -> None:
        """Close the sessions and stop the servers. Bounded; may be called again."""
        ...


class Server(Protocol):
    """One environment server that can be started again after its death."""

    @property
    def url(self) -> str:
        """Where it listens, http://host:port or unix:///path. May change with every start."""
        ...

    @property
    def log(self) -> Path | None:
        """The file with its output, None if it is not ours to read."""
        ...

    async def start(self) -> None:
        """Return when it answers; raise HostError or ConfigError with nothing left running."""
        ...

    async def died(self) -> str:
        """Return when it is dead, with the cause in words: 'exit code 1'."""
        ...

    async def stop(self) -> None:
        """End it, whether alive, dead or never started. Bounded; may be called again."""
        ...
