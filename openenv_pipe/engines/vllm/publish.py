"""How a new policy gets to servers: as an adapter under a fresh name, or as all its weights.

A publisher writes in torch's thread, once for all servers, sends on the event loop, and can give a
server that has just started what it has to know. It never changes a file that a server may still
read. Which server has which version is for `replica.py` to know. Weights that go from memory to
memory, without files, are for `publish_broadcast.py`.
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

from openenv_pipe.engines.vllm.client import BASE, ServerGoneError, VllmClient
from openenv_pipe.engines.vllm.policy_source import Trainee
from openenv_pipe.engines.vllm.server_command import MOST_ADAPTERS_KEPT
from openenv_pipe.errors import EngineError

MOST_WEIGHTS_KEPT = 2  # the last but one may be read by a server that is being restarted


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One version of the policy on its way, or there."""

    name: str
    version: int
    expected: np.ndarray = field(repr=False, compare=False)  # [P, V], for the canary


class Publisher(Protocol):
    """One way to publish."""

    def begin_update(self) -> None:
        """The policy changes from now on, until the next `adopt`."""

    async def write(self, version: int, expected_PV: np.ndarray) -> Published:
        """The policy as it is now, ready to be sent."""

    @property
    def latest(self) -> Published | None:
        """What was adopted last."""

    def adopt(self, published: Published) -> None:
        """From now on a server that has to be started again gets it."""

    def model(self, published: Published | None) -> str:
        """What a request names to get this policy; None: a server as it starts."""

    async def send(self, client: VllmClient, published: Published, *, paused: bool) -> None:
        """Makes it the current policy of a server. May be called again.

        paused: it takes no requests, and goes on doing so.
        """

    async def restore(self, client: VllmClient) -> Published | None:
        """Gives a server that has just started what it must have; what it serves then."""

    async def retire(self, clients: Sequence[VllmClient]) -> None:
        """Lets old versions go, on the servers first."""

    async def withdraw(self, client: VllmClient) -> None:
        """Leaves nothing on a server that goes on without us and cannot read our files then."""

    async def clear(self, client: VllmClient) -> None:
        """Takes from a server what runs before this one could not, because they were killed."""

    def close(self) -> None:
        """Nothing will be sent any more."""


class _Versions:
    """A folder of its own for each version, written in torch's thread, and which of them count."""

    def __init__(self, trainee: Trainee, root: Path, executor: Executor) -> None:
        self._trainee = trainee
        self._root = root
        self._executor = executor
        self._num_written = 0
        self._kept: list[Published] = []

    @property
    def latest(self) -> Published | None:
        return self._kept[-1] if self._kept else None

    def adopt(self, published: Published) -> None:
        self._kept.append(published)

    def begin_update(self) -> None:
        """Files stay as they are."""

    def close(self) -> None:
        """The folders go with their root."""

    def _folder(self, published: Published) -> Path:
        return self._root / published.name

    async def _written(
        self, version: int, expected_PV: np.ndarray, write: Callable[[Path], None]
    ) -> Published:
        self._num_written += 1
        # The root sets runs apart that attach to the same server.
        name = f"{self._root.name}-{self._num_written}-step-{version}"
        published = Published(name=name, version=version, expected=expected_PV)
        folder = self._folder(published)
        folder.mkdir()
        await asyncio.get_running_loop().run_in_executor(self._executor, write, folder)
        return published


class AdapterPublisher(_Versions):
    """LoRA: a server keeps the base and the last adapters, each under a name of its own, so that
    requests under way end with the adapter that they began with."""

    async def write(self, version: int, expected_PV: np.ndarray) -> Published:
        return await self._written(version, expected_PV, self._trainee.write_adapter)

    def model(self, published: Published | None) -> str:
        return published.name if published else BASE

    async def send(self, client: VllmClient, published: Published, *, paused: bool) -> None:
        try:
            await client.load_adapter(published.name, self._folder(published))
        except EngineError as error:  # no other one has ever had this name
            if "already been loaded" not in str(error):
                raise

    async def restore(self, client: VllmClient) -> Published | None:
        """All that requests may still ask for, and what is adopted meanwhile."""
        latest = None
        while self._kept and latest is not self._kept[-1]:
            for latest in list(self._kept):
                try:
                    await self.send(client, latest, paused=False)
                except EngineError:
                    if latest in self._kept:  # else it was retired meanwhile
                        raise
        return latest

    async def retire(self, clients: Sequence[VllmClient]) -> None:
        """Unloaded first, deleted later: a server reads adapters again when it lacks room, and one
        whose folder is gone dies of it."""
        while len(self._kept) > MOST_ADAPTERS_KEPT:
            old = self._kept.pop(0)
            unloading = (client.unload_adapter(old.name) for client in clients)
            results = await asyncio.gather(*unloading, return_exceptions=True)
            failures = [each for each in results if each is not None]
            for failure in failures:
                if not isinstance(failure, ServerGoneError):  # its next one never hears of it
                    raise failure
            if not failures:
                await asyncio.to_thread(shutil.rmtree, self._folder(old), True)

    async def withdraw(self, client: VllmClient) -> None:
        for published in self._kept:
            await client.unload_adapter(published.name)

    async def clear(self, client: VllmClient) -> None:
        """Adapters named after a folder beside ours that is gone: a run that lives keeps its files
        until the server has let go of them."""
        for name, folder in (await client.adapters()).items():
            run = folder.parent
            is_of_a_run = run.parent == self._root.parent and name.startswith(f"{run.name}-")
            if is_of_a_run and not await asyncio.to_thread(folder.exists):
                await client.unload_adapter(name)


def replacing_weights(client: VllmClient, *, paused: bool) -> AbstractAsyncContextManager[None]:
    """See `VllmClient.replacing_weights`. paused: the server takes no requests as it is."""
    return nullcontext() if paused else client.replacing_weights()


class WeightsPublisher(_Versions):
    """All weights, an adapter merged into them if there is one, into a server that goes on."""

    async def write(self, version: int, expected_PV: np.ndarray) -> Published:
        return await self._written(version, expected_PV, self._trainee.write_weights)

    def model(self, published: Published | None) -> str:
        return BASE

    async def send(self, client: VllmClient, published: Published, *, paused: bool) -> None:
        async with replacing_weights(client, paused=paused):
            await client.load_weights(self._folder(published), str(published.version))

    async def restore(self, client: VllmClient) -> Published | None:
        latest = None
        while self._kept and latest is not self._kept[-1]:  # one may be adopted meanwhile
            latest = self._kept[-1]
            await self.send(client, latest, paused=False)
        return latest

    async def retire(self, clients: Sequence[VllmClient]) -> None:
        while len(self._kept) > MOST_WEIGHTS_KEPT:
            await asyncio.to_thread(shutil.rmtree, self._folder(self._kept.pop(0)), True)

    async def withdraw(self, client: VllmClient) -> None:
        """Weights that were read need no files."""

    async def clear(self, client: VllmClient) -> None:
        """There is one policy, and the next one replaces it."""
