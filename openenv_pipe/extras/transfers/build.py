"""Send all weights from memory to memory, and check beforehand that they reach the servers."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from urllib.parse import urlsplit

import torch

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.inside.openenv_pipe_broadcast import BroadcastError
from openenv_pipe.engines.vllm.server_command import TransferBackend
from openenv_pipe.engines.vllm.sleep_mode import LearnerFootprint
from openenv_pipe.engines.vllm.transfer import PolicyVersion, Transfer, replacing_weights
from openenv_pipe.errors import ConfigError, EngineError, PipeError
from openenv_pipe.extras.transfers.ipc import IpcLink
from openenv_pipe.extras.transfers.link import GlooLink, Link, TransferError
from openenv_pipe.extras.transfers.nccl import NcclLink
from openenv_pipe.models.weights import PolicyWeights
from openenv_pipe.system.http import LOOPBACK
from openenv_pipe.system.out_of_memory import PUBLISHING
from openenv_pipe.system.tasks import in_thread

OUT_OF_MEMORY_STAGE = PUBLISHING
REASON_LIMIT_S = 10.0  # for a server to fail too, or to say why the learner's end has failed


class MemoryTransfer(Transfer):
    """All weights, over a link to each server, so that the death of one does not affect others.

    The learner holds only the current weights, which change during an update. A server that is
    restarted meanwhile therefore waits until the next version is published.
    """

    def __init__(
        self, weights: PolicyWeights, executor: Executor, make_link: Callable[[VllmClient], Link]
    ) -> None:
        """executor: torch's thread."""
        self._weights = weights
        self._executor = executor
        self._make_link = make_link
        self._current: PolicyVersion | None = None  # what is in memory; None during an update
        self._is_current = asyncio.Event()  # there is such a version
        self._turn = asyncio.Lock()  # one server at a time receives weights from torch's thread
        self._links: dict[VllmClient, Link] = {}

    async def write(self, version: PolicyVersion) -> None:
        """Take note of the version: `send` reads the learner's memory."""
        self._current = version
        self._is_current.set()

    def begin_update(self) -> None:
        self._current = None
        self._is_current.clear()

    async def wait_until_readable(self) -> None:
        await self._is_current.wait()

    def can_read(self, version: PolicyVersion) -> bool:
        return version is self._current

    async def send(self, client: VllmClient, version: PolicyVersion, *, paused: bool) -> None:
        async with self._turn, replacing_weights(client, paused=paused):
            for gone in [each for each in self._links if each.is_closed]:  # Their servers are dead.
                await asyncio.to_thread(self._links.pop(gone).close)
            if not self.can_read(version):
                raise EngineError(f"version {version.step} has left the learner's memory")
            await self._send_weights(client, version)
            if paused:  # asleep, because its GPU does not hold both: it needs the memory next
                await in_thread(self._executor, self._weights.free_memory)

    async def withdraw(self, client: VllmClient, versions: Sequence[PolicyVersion]) -> None:
        """Disconnect the server's workers from the learner."""
        if (link := self._links.get(client)) is not None:
            await link.leave(client)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    async def _send_weights(self, client: VllmClient, version: PolicyVersion) -> None:
        """Send the learner's current weights.

        The work for torch's thread is queued before anything is awaited, so that it is done before
        the learner's next update.

        Raises ServerGoneError if the server does not answer, EngineError if it cannot take the
        weights, and what the learner raises if it cannot gather them, such as RankLostError.
        """
        if client not in self._links:
            self._links[client] = self._make_link(client)
        link = self._links[client]
        loop, is_ready = asyncio.get_running_loop(), asyncio.Event()
        found: list[Mapping[str, torch.Tensor]] = []

        def send() -> None:
            found.append(self._weights.tensors())
            loop.call_soon_threadsafe(is_ready.set)
            link.send(found[0])

        async def take() -> None:
            await is_ready.wait()  # a server that waits for the learner serves no requests
            await link.take(client, found[0], version.label)

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
            if _has_failed(sending):  # then a server that lives may wait forever
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


def _has_failed(end: asyncio.Future[None]) -> bool:
    return end.cancelled() or (end.done() and end.exception() is not None)


def _is_its_own(error: BaseException | None) -> bool:
    """Whether the learner's end failed, and not only because the other end did."""
    return error is not None and not isinstance(error, TransferError | BroadcastError)


def build_broadcast(
    weights: PolicyWeights, root: Path, executor: Executor, backend: TransferBackend | None
) -> MemoryTransfer:
    """Send over NCCL to servers on other GPUs, and over gloo between CPUs."""
    numbers = itertools.count()

    def link(client: VllmClient) -> Link:
        return NcclLink() if backend == "nccl" else GlooLink(root / f"meeting-{next(numbers)}")

    return MemoryTransfer(weights, executor, link)


def build_ipc(
    weights: PolicyWeights, root: Path, executor: Executor, backend: TransferBackend | None
) -> MemoryTransfer:
    """Send over CUDA IPC to a server on the learner's GPU."""
    return MemoryTransfer(weights, executor, lambda client: IpcLink())


def check_broadcast(config: VllmEngineConfig, footprint: LearnerFootprint) -> None:
    if not footprint.on_gpu:
        if footprint.servers_elsewhere:
            raise ConfigError(
                "engine.weight_transfer=broadcast from a CPU needs servers on this machine, and "
                "cluster.vllm_on_nodes=true; set engine.weight_transfer=files"
            )
        _check_near(config)
    elif config.launch == "managed" and footprint.shares_gpu:
        raise ConfigError(
            "engine.weight_transfer=broadcast: the servers share the learner's GPU, but NCCL "
            "connects only different GPUs; set engine.weight_transfer=ipc or files"
        )


def check_ipc(config: VllmEngineConfig, footprint: LearnerFootprint) -> None:
    if not footprint.on_gpu:
        raise ConfigError(
            "engine.weight_transfer=ipc needs a GPU that learner and server share, and this run "
            "learns on a CPU; set engine.weight_transfer=broadcast or files"
        )
    if config.launch == "managed" and not footprint.shares_gpu:
        raise ConfigError(
            "engine.weight_transfer=ipc: the servers run on GPUs that the learner does not use; "
            "set engine.weight_transfer=broadcast, or hide those GPUs by CUDA_VISIBLE_DEVICES"
        )


def _check_near(config: VllmEngineConfig) -> None:
    """Raise ConfigError for servers elsewhere: gloo meets them on loopback and in a file."""
    for url in config.urls:
        if urlsplit(url).hostname not in LOOPBACK:
            raise ConfigError(
                f"engine.weight_transfer=broadcast from a CPU needs servers on this machine, and "
                f"{url} may be on another; expected one of {', '.join(LOOPBACK)}, or "
                "engine.weight_transfer=files"
            )
