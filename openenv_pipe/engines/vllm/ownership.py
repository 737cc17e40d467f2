"""Whose weights a server has, so that no run trains on the tokens of another.

Weights carry a label with the run that published them, and completions carry the label of the
weights that sampled them. A server that was there before the run is also claimed: its workers
remember the run (`inside/openenv_pipe_worker.py`), and the claim lasts as long as it is renewed. A
run that replaces all weights, or puts the server to sleep, has it alone; runs that publish adapters
only, whose names carry the run, share it.
"""

import asyncio
import os
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openenv_pipe.engines.vllm.answers import ServerGoneError
from openenv_pipe.errors import ConfigError, EngineError
from openenv_pipe.system.untrusted_text import quoted

if TYPE_CHECKING:
    from openenv_pipe.engines.vllm.client import VllmClient

RENEW_EVERY_S = 5.0
LEASE_S = 30.0  # a claim that was not renewed for so long may be taken over
POLL_S = 1.0
RELEASE_LIMIT_S = 5.0
LONGEST_NAME = 300  # characters of another run's name that a message quotes
_LABEL = re.compile(r"openenv-pipe:([0-9a-f]{16}):(\d{1,18}):(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A run, as its servers know it."""

    id: str  # random: no two runs have the same
    name: str  # for people

    @classmethod
    def new(cls, what: object) -> "Owner":
        """Return the identity of a run of this process. what: its folder, for messages."""
        host = socket.gethostname()
        return cls(id=secrets.token_hex(8), name=f"{what} (process {os.getpid()} on {host})")

    def label(self, version: int) -> str:
        return f"openenv-pipe:{self.id}:{version}:{self.name}"

    def version(self, label: str, url: str) -> int:
        """Return the version that a label of this run names.

        Raises:
            EngineError: the label is another run's, which the message names.
            ServerGoneError: it is nobody's: the server has lost the policy.
        """
        reject_other_run(label, self, url)
        if (found := _LABEL.fullmatch(label)) is None:
            raise ServerGoneError(f"{url} has lost the policy: its weights are {quoted(label)}")
        return int(found[2])


def reject_other_run(label: str, owner: Owner, url: str) -> None:
    """Raise EngineError if a label is that of another run than `owner`."""
    if found := _of_another_run(label, owner, url):
        raise EngineError(
            f"{found}. Nothing that it sampled is used; give each run a server of its own, and "
            "resume this run"
        )


def reject_left_weights(label: str, owner: Owner, url: str) -> None:
    """Raise ConfigError if the weights that adapters would change are those of another run.

    Nothing replaces them, and a run that ended may have moved them by less than the logprob check
    notices.
    """
    if found := _of_another_run(label, owner, url):
        raise ConfigError(
            f"engine.url: {found}; expected the model's own weights, to which "
            "engine.publish=adapter adds an adapter: restart the server, or use another one"
        )


def _of_another_run(label: str, owner: Owner, url: str) -> str:
    """Return in words that a label is that of another run than `owner`; empty if it is not."""
    found = _LABEL.fullmatch(label)
    if found is None or found[1] == owner.id:
        return ""
    name = quoted(found[3], LONGEST_NAME)
    return f"the server at {url} has the weights of another run: {name}, version {found[2]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimed:
    holder: str  # the run that has the server; empty: the claim is granted
    silent_s: float  # since the holder last renewed its claim
    is_new: bool  # the server did not have this claim before


class Claim:
    """This run's claim of an attached server, which is renewed from `acquire` until `release`."""

    def __init__(
        self,
        client: "VllmClient",
        owner: Owner,
        *,
        exclusive: bool,
        notify: Callable[[str], None],
        on_lost: Callable[[EngineError], None],
        on_forgotten: Callable[[], None],
    ) -> None:
        """Claim nothing yet.

        exclusive: no other run may use the server meanwhile.
        on_lost: is called if another run has taken over the server.
        on_forgotten: is called if the server does not know the claim any more, because
            somebody has restarted it.
        """
        self._client = client
        self._exclusive = exclusive
        self._id, self._name = f"{owner.id}/{client.url}", owner.name
        self._notify = notify
        self._on_lost = on_lost
        self._on_forgotten = on_forgotten
        self._renewing: asyncio.Task[None] | None = None

    async def acquire(self) -> None:
        """Claim the server. The claim of a dead run is waited for, up to LEASE_S.

        Raises:
            ConfigError: a living run has the server.
            EngineError, ServerGoneError: the server does not take claims, or is gone.
        """
        last_silent_s = -1.0
        while True:
            if (claimed := await self._ask()) is None:
                return
            if not claimed.holder:
                break
            if claimed.silent_s < last_silent_s:  # the holder has renewed it: it lives
                raise ConfigError(
                    f"engine.url: the server at {self._client.url} is in use by another run: "
                    f"{quoted(claimed.holder, LONGEST_NAME)}; use another server, or wait until "
                    "that run has ended"
                )
            if last_silent_s < 0:
                self._notify(
                    f"{self._client.url} is claimed by {quoted(claimed.holder, LONGEST_NAME)}: "
                    f"checking for up to {LEASE_S:g} s whether that run is alive"
                )
            last_silent_s = claimed.silent_s
            await asyncio.sleep(POLL_S)
        self._renewing = asyncio.create_task(self._renew_on())

    async def confirm(self) -> None:
        """Renew the claim, before something changes the server for all who use it.

        Raises:
            EngineError: another run has taken over the server.
            ServerGoneError: the server was restarted and does not have the policy.
        """
        claimed = await self._ask()
        if claimed is None:
            return
        if claimed.holder:
            error = EngineError(
                f"the server at {self._client.url} was taken over by another run: "
                f"{quoted(claimed.holder, LONGEST_NAME)}, because this one did not answer for "
                f"{LEASE_S:g} s; give each run a server of its own, and resume this run"
            )
            self._on_lost(error)
            raise error
        if claimed.is_new:
            self._on_forgotten()
            raise ServerGoneError(f"{self._client.url} was restarted by somebody else")

    async def release(self) -> None:
        """Let others have the server. A server that does not answer forgets the claim later."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            with suppress(EngineError, ServerGoneError, TimeoutError):
                async with asyncio.timeout(RELEASE_LIMIT_S):
                    await self._client.release_server(self._id)

    async def _ask(self) -> Claimed | None:
        return await self._client.claim_server(self._id, self._name, self._exclusive, LEASE_S)

    async def _renew_on(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            # A server that is gone, or answers something else, is the replica's concern.
            with suppress(EngineError, ServerGoneError):
                await self.confirm()
