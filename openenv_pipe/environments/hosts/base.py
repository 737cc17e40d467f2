"""The interface of a host, which owns the environment servers of a run and lends their sessions.

A host knows neither episodes nor any particular environment. `hosts.supervised` implements hosts
whose servers can be restarted.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from pydantic import JsonValue

from openenv_pipe.environments.client.session import EpisodeSession, Session
from openenv_pipe.system.http import Access


class SessionLender(Protocol):
    """Lends what an episode is played in: a host, or a player's seat in a game."""

    def session(self) -> AbstractAsyncContextManager[EpisodeSession]:
        """See `Host.session`."""


class Host(Protocol):
    """Runs environment servers and lends sessions with them.

    A host of your own (`host: {type: python, ...}`) is made by
    target(env, logs, sessions_per_server, **options): the `EnvConfig`, the folder for log files,
    and how many sessions one server allows. `hosts.supervised.SupervisedHost` implements
    everything below for servers that implement `system.supervisor.RestartableServer`.
    """

    @property
    def capacity(self) -> int:
        """How many sessions can be lent at the same time, over all servers."""

    @property
    def urls(self) -> Sequence[str]:
        """URLs of the servers that are up, http://host:port or unix:///path."""

    @property
    def num_deaths(self) -> int:
        """How many servers have died, or stopped answering, so far."""

    @property
    def access(self) -> Access:
        """The headers and TLS settings of every request to the servers."""

    async def start(self) -> None:
        """Start the servers and open every session once.

        Raises:
            HostError: a server does not start, or accepts too few sessions.
            ConfigError: the environment cannot be run as it is configured.

        After an error, no server is left running.
        """

    def facts(self) -> dict[str, JsonValue]:
        """Return digests of the code that the started servers run, for the run's record."""

    def session(self) -> AbstractAsyncContextManager[Session]:
        """Lend a usable session; wait for one if all are lent.

        The session may have been used before, so the borrower resets it first.

        Raises:
            SessionError: no session can be opened now.
            HostError: the host has failed for good, or is closed.
        """

    async def close(self) -> None:
        """Close the sessions and stop the servers, in bounded time. Repeating it does no harm."""
