"""A lease of servers that runs of one process share, one run at a time."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from openenv_pipe.errors import PipeError


class ServerLease(Protocol):
    """Servers that a run has to itself until it releases them. They run on another event loop."""

    @property
    def urls(self) -> Sequence[str]:
        """URLs of the servers that are up; a restarted server may have another one."""

    @property
    def failure(self) -> PipeError | None:
        """The error that ended the servers for good; None while they work."""

    @property
    def key(self) -> str | None:
        """What every request to them needs, and no record has; None: nothing."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts about the servers."""

    def release(self) -> None:
        """Let the next run have the servers."""


class Lessor(Protocol):
    """Owns servers, and leases them."""

    async def lease(self, wanted: Mapping[str, Any]) -> ServerLease:
        """Wait for servers that fit `wanted`.

        Raises:
            PipeError: They do not start.
        """
