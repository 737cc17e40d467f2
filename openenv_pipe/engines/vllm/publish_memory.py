"""Publish all weights without files: from the learner's memory into that of the servers.

The learner holds only the current weights, which change during an update. A server that is
restarted meanwhile therefore waits until the next version is published.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import numpy as np

from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.connection import BASE
from openenv_pipe.engines.vllm.inside.openenv_pipe_broadcast import BroadcastError
from openenv_pipe.engines.vllm.ownership import Owner
from openenv_pipe.engines.vllm.policy_source import PolicySource
from openenv_pipe.engines.vllm.publish import Published, replacing_weights
from openenv_pipe.engines.vllm.transfer import Link, TransferError
from openenv_pipe.errors import EngineError, PipeError
from openenv_pipe.system.tasks import in_thread

if TYPE_CHECKING:
    import torch

REASON_LIMIT_S = 10.0  # for a server to fail too, or to say why the learner's end has failed


class MemoryPublisher:
    """A `publish.Publisher`.

    Each server has a link of its own, so that the death of one does not affect the others.
    """

    def __init__(
        self,
        policy_source: PolicySource,
        executor: Executor,
        make_link: Callable[[VllmClient], Link],
        owner: Owner,
    ) -> None:
        """executor: torch's thread."""
        self.owner = owner
        self.latest: Published | None = None
        self._policy_source = policy_source
        self._executor = executor
        self._make_link = make_link
        self._is_current = asyncio.Event()  # the learner's weights are the version adopted last
        self._turn = asyncio.Lock()  # one server at a time receives weights from torch's thread
        self._links: dict[VllmClient, Link] = {}

    def begin_update(self) -> None:
        self._is_current.clear()

    async def write(self, version: int, expected_PV: np.ndarray) -> Published:
        """Return the version. Nothing is written: `send` reads the learner's memory."""
        label = self.owner.label(version)
        return Published(name=f"step-{version}", version=version, label=label, expected=expected_PV)

    def adopt(self, published: Published) -> None:
        self.latest = published
        self._is_current.set()

    def model(self, published: Published | None) -> str:
        return BASE

    async def send(self, client: VllmClient, published: Published, *, paused: bool) -> None:
        if published is not self.latest or not self._is_current.is_set():
            raise EngineError(f"version {published.version} has left the learner's memory")
        async with self._turn, replacing_weights(client, paused=paused):
            await self._close_links_of_dead_servers()
            await self._send_weights(client, published)
            if paused:  # asleep, because its GPU does not hold both: it needs the memory next
                await in_thread(self._executor, self._policy_source.free_memory)

    async def restore(self, client: VllmClient) -> Published | None:
        latest = None
        while latest is not self.latest:  # another version may be adopted meanwhile
            await self._is_current.wait()
            async with self._turn:
                await self._close_links_of_dead_servers()
                if self._is_current.is_set():
                    latest = self.latest
                    assert latest is not None
                    await self._send_weights(client, latest)
                    await client.reset_prefix_cache()  # the logprob check may have filled it
        return latest

    async def retire(self, clients: Sequence[VllmClient]) -> None:
        """Do nothing: no old version is kept."""

    async def withdraw(self, client: VllmClient) -> None:
        """Disconnect the server's workers from the learner."""
        if (link := self._links.get(client)) is not None:
            await link.leave(client)

    async def clear(self, client: VllmClient) -> None:
        """Do nothing: the next policy replaces the one that the server has."""

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    async def _send_weights(self, client: VllmClient, published: Published) -> None:
        """Send the learner's current weights.

        The work for torch's thread is queued before anything is awaited, so that it is done before
        the learner's next update.

        Raises:
            EngineError: learner and server cannot transfer the weights.
            ServerGoneError: the server does not answer.
            PipeError: the learner cannot gather its weights, such as RankLostError.
        """
        if client not in self._links:
            self._links[client] = self._make_link(client)
        link = self._links[client]
        loop, is_ready = asyncio.get_running_loop(), asyncio.Event()
        found: list[Mapping[str, torch.Tensor]] = []

        def send() -> None:
            found.append(self._policy_source.weights())
            loop.call_soon_threadsafe(is_ready.set)
            link.send(found[0])

        async def take() -> None:
            await is_ready.wait()  # a server that waits for the learner serves no requests
            await link.take(client, found[0], published.label)

        sending = in_thread(self._executor, send)
        taking = asyncio.create_task(take())
        try:
            await asyncio.wait((taking, sending), return_when=asyncio.FIRST_EXCEPTION)
        finally:
            if not is_ready.is_set():  # then the server has not been told to receive either
                taking.cancel()
                sending.cancel()
            if any(_has_failed(end) for end in (taking, sending)):
                self._links.pop(client, None)
                await asyncio.to_thread(link.close)
            if _has_failed(sending):  # then a server that lives may wait for ever
                await asyncio.wait((taking,), timeout=REASON_LIMIT_S)
                taking.cancel()
            there, here = await asyncio.gather(taking, sending, return_exceptions=True)
        if isinstance(here, PipeError):
            raise here
        if isinstance(there, EngineError) and _is_its_own(here):  # either may be the cause
            raise EngineError(f"{there}; and the learner: {here}") from here
        if isinstance(there, Exception):
            raise there
        if here is not None:
            raise EngineError(f"the weights cannot be sent to {client.url}: {here}") from here

    async def _close_links_of_dead_servers(self) -> None:
        for gone in [each for each in self._links if each.is_closed]:
            await asyncio.to_thread(self._links.pop(gone).close)


def _has_failed(end: asyncio.Future[None]) -> bool:
    return end.cancelled() or (end.done() and end.exception() is not None)


def _is_its_own(error: BaseException | None) -> bool:
    """Whether the learner's end failed, and not only because the other end did."""
    return error is not None and not isinstance(error, TransferError | BroadcastError)
