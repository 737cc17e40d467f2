"""Publish policies to servers through files: as an adapter with a new name, or as all weights.

A publisher writes a policy once for all servers, in torch's thread, and sends it on the event loop.
A server that has just started gets every version that requests may name. No file that a server may
still read is changed. `replica.py` keeps track of which server has which version, and
`publish_memory.py` sends weights from memory to memory.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from openenv_pipe.engines.vllm.answers import ServerGoneError
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.connection import BASE
from openenv_pipe.engines.vllm.ownership import Owner
from openenv_pipe.engines.vllm.policy_source import PolicySource
from openenv_pipe.engines.vllm.server_command import MAX_ADAPTERS
from openenv_pipe.errors import EngineError
from openenv_pipe.system.tasks import in_thread

MAX_WEIGHTS_FOLDERS = 2  # a server that is being restarted may still read the previous version


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One version of the policy."""

    name: str
    version: int
    label: str  # of all weights of this version, see `ownership.py`
    expected: np.ndarray = field(repr=False, compare=False)  # [P, V], for the logprob check


class Publisher(Protocol):
    """The interface of publishers. Methods with a client raise EngineError and ServerGoneError."""

    owner: Owner  # the run

    def begin_update(self) -> None:
        """Take note that the policy changes from now on, until the next `adopt`."""

    async def write(self, version: int, expected_PV: np.ndarray) -> Published:
        """Prepare the policy as it is now for sending."""

    @property
    def latest(self) -> Published | None:
        """The version that was adopted last."""

    def adopt(self, published: Published) -> None:
        """Make this the version that restarted servers get."""

    def model(self, published: Published | None) -> str:
        """Return the model's name in requests for a version; None: the base as it was loaded."""

    async def send(self, client: VllmClient, published: Published, *, paused: bool) -> None:
        """Give a server this version of the policy. Repeating it does no harm.

        Args:
            paused: the server takes no requests at present, and is left so.
        """

    async def restore(self, client: VllmClient) -> Published | None:
        """Give a server that has just started the versions it needs; return the latest."""

    async def retire(self, clients: Sequence[VllmClient]) -> None:
        """Drop old versions, first on the servers and then in files."""

    async def withdraw(self, client: VllmClient) -> None:
        """Remove this run's versions from a server that keeps running after the run."""

    async def clear(self, client: VllmClient) -> None:
        """Remove versions of killed runs from a server."""

    def close(self) -> None:
        """Free the publisher's resources. Nothing can be sent afterwards."""


class _FilePublisher:
    """Writes each version into a folder of its own, in torch's thread, and keeps the last ones."""

    def __init__(
        self, policy_source: PolicySource, root: Path, executor: Executor, owner: Owner
    ) -> None:
        self.owner = owner
        self._policy_source = policy_source
        self._root = root
        self._executor = executor
        self._num_written = 0
        self._adopted: list[Published] = []

    @property
    def latest(self) -> Published | None:
        return self._adopted[-1] if self._adopted else None

    def adopt(self, published: Published) -> None:
        self._adopted.append(published)

    def begin_update(self) -> None:
        """Do nothing: files do not change with the policy."""

    def close(self) -> None:
        """Do nothing: the caller, which made the root folder, removes it."""

    def _folder(self, published: Published) -> Path:
        return self._root / published.name

    async def _written(
        self, version: int, expected_PV: np.ndarray, write: Callable[[Path], None]
    ) -> Published:
        self._num_written += 1
        # The root's name differs between runs that attach to the same server.
        name = f"{self._root.name}-{self._num_written}-step-{version}"
        label = self.owner.label(version)
        published = Published(name=name, version=version, label=label, expected=expected_PV)
        folder = self._folder(published)
        folder.mkdir()
        await in_thread(self._executor, write, folder)
        return published


class AdapterPublisher(_FilePublisher):
    """Publishes LoRA adapters, each under its own name.

    A server keeps the last few, so that a request ends with the adapter it began with.
    """

    async def write(self, version: int, expected_PV: np.ndarray) -> Published:
        return await self._written(version, expected_PV, self._policy_source.write_adapter)

    def model(self, published: Published | None) -> str:
        return published.name if published else BASE

    async def send(self, client: VllmClient, published: Published, *, paused: bool) -> None:
        try:
            await client.load_adapter(published.name, self._folder(published))
        except EngineError as error:
            if "already been loaded" not in str(error):
                raise
            if not await client.has_adapter(published.name, self._folder(published)):
                raise EngineError(
                    f"{client.url} has another adapter under the name {published.name}, which only "
                    "this run uses: somebody has replaced it"
                ) from error

    async def restore(self, client: VllmClient) -> Published | None:
        """Send all versions that requests may name, including any that are adopted meanwhile."""
        latest = None
        while self._adopted and latest is not self._adopted[-1]:
            for latest in list(self._adopted):
                try:
                    await self.send(client, latest, paused=False)
                except EngineError:
                    if latest in self._adopted:  # else it was retired meanwhile
                        raise
        return latest

    async def retire(self, clients: Sequence[VllmClient]) -> None:
        """Unload old adapters, then delete their files.

        A server may drop a loaded adapter to make room and read it again, and dies if the file is
        gone by then.
        """
        while len(self._adopted) > MAX_ADAPTERS:
            old = self._adopted.pop(0)
            unloading = (client.unload_adapter(old.name) for client in clients)
            results = await asyncio.gather(*unloading, return_exceptions=True)
            failures = [each for each in results if each is not None]
            for failure in failures:
                # A server that is gone does not get this adapter again after its restart.
                if not isinstance(failure, ServerGoneError):
                    raise failure
            if not failures:
                await asyncio.to_thread(shutil.rmtree, self._folder(old), True)

    async def withdraw(self, client: VllmClient) -> None:
        for published in self._adopted:
            await client.unload_adapter(published.name)

    async def clear(self, client: VllmClient) -> None:
        """Unload adapters of dead runs, which are those whose files are gone.

        A living run keeps an adapter's files until the server has unloaded it.
        """
        for name, folder in (await client.adapters()).items():
            run = folder.parent
            is_of_a_run = run.parent == self._root.parent and name.startswith(f"{run.name}-")
            if is_of_a_run and not await asyncio.to_thread(folder.exists):
                await client.unload_adapter(name)


def replacing_weights(client: VllmClient, *, paused: bool) -> AbstractAsyncContextManager[None]:
    """Do as `VllmClient.replacing_weights`, but nothing if the server is paused already."""
    return nullcontext() if paused else client.replacing_weights()


class WeightsPublisher(_FilePublisher):
    """Publishes all weights, with an adapter merged into them if there is one."""

    async def write(self, version: int, expected_PV: np.ndarray) -> Published:
        return await self._written(version, expected_PV, self._policy_source.write_weights)

    def model(self, published: Published | None) -> str:
        return BASE

    async def send(self, client: VllmClient, published: Published, *, paused: bool) -> None:
        async with (
            client.readable(self._folder(published)) as folder,
            replacing_weights(client, paused=paused),
        ):
            await client.load_weights(folder, published.label)

    async def restore(self, client: VllmClient) -> Published | None:
        latest = None
        while self._adopted and latest is not self._adopted[-1]:  # one may be adopted meanwhile
            latest = self._adopted[-1]
            await self.send(client, latest, paused=False)
        return latest

    async def retire(self, clients: Sequence[VllmClient]) -> None:
        while len(self._adopted) > MAX_WEIGHTS_FOLDERS:
            await asyncio.to_thread(shutil.rmtree, self._folder(self._adopted.pop(0)), True)

    async def withdraw(self, client: VllmClient) -> None:
        """Do nothing: a server needs no files once it has read the weights."""

    async def clear(self, client: VllmClient) -> None:
        """Do nothing: the next policy replaces the one that the server has."""
