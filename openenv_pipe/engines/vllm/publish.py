"""How a new policy gets to the server: as an adapter under a fresh name, or as all its weights.

A publisher writes in torch's thread, sends on the event loop, and can give a server that has just
started what it has to know. It never changes a file that a server may still read.
"""

import asyncio
import shutil
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from openenv_pipe.engines.vllm.client import BASE, VllmClient
from openenv_pipe.engines.vllm.server_command import MOST_ADAPTERS_KEPT
from openenv_pipe.engines.vllm.trainee import Trainee
from openenv_pipe.errors import EngineError

MOST_WEIGHTS_KEPT = 2  # the last but one may be read by a server that is being restarted


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One version of the policy on its way, or there."""

    name: str
    version: int
    folder: Path


class Publisher(Protocol):
    """One way to publish."""

    model: str  # what a request names to get the current policy
    version: int

    async def write(self, version: int) -> Published:
        """The files of the policy as it is now."""

    def adopt(self, published: Published) -> None:
        """From now on a server that has to be started again gets it."""

    async def send(self, client: VllmClient, published: Published) -> None:
        """Makes it the current policy of a server. May be called again."""

    async def restore(self, client: VllmClient) -> None:
        """What a server that has just started must be given."""

    async def retire(self, client: VllmClient) -> None:
        """Lets old versions go, on the server first."""

    async def withdraw(self, client: VllmClient) -> None:
        """Leaves nothing on a server that goes on without us and cannot read our files then."""


class _Folders:
    """A folder of its own for each version, written in torch's thread."""

    def __init__(self, root: Path, executor: Executor) -> None:
        self._root = root
        self._executor = executor
        self._num_written = 0

    async def write(self, version: int, write: Callable[[Path], None]) -> Published:
        self._num_written += 1
        # The root sets runs apart that attach to the same server.
        name = f"{self._root.name}-{self._num_written}-step-{version}"
        folder = self._root / name
        folder.mkdir()
        await asyncio.get_running_loop().run_in_executor(self._executor, write, folder)
        return Published(name=name, version=version, folder=folder)


class AdapterPublisher:
    """LoRA: the server keeps the base and the last adapters, each under a name of its own, so that
    requests under way end with the adapter that they began with."""

    def __init__(self, trainee: Trainee, root: Path, executor: Executor) -> None:
        self.model, self.version = BASE, 0
        self._trainee = trainee
        self._folders = _Folders(root, executor)
        self._kept: list[Published] = []

    async def write(self, version: int) -> Published:
        return await self._folders.write(version, self._trainee.write_adapter)

    def adopt(self, published: Published) -> None:
        self._kept.append(published)

    async def send(self, client: VllmClient, published: Published) -> None:
        await self._load(client, published)
        self.model, self.version = published.name, published.version

    async def restore(self, client: VllmClient) -> None:
        """All that requests may still ask for; those that begin meanwhile ask for no older one."""
        for published in self._kept:
            await self._load(client, published)
        if self._kept:
            self.model, self.version = self._kept[-1].name, self._kept[-1].version

    async def retire(self, client: VllmClient) -> None:
        """Unloaded first, deleted later: a server reads adapters again when it lacks room, and one
        whose folder is gone dies of it."""
        while len(self._kept) > MOST_ADAPTERS_KEPT:
            old = self._kept.pop(0)
            await client.unload_adapter(old.name)
            await asyncio.to_thread(shutil.rmtree, old.folder, True)

    async def withdraw(self, client: VllmClient) -> None:
        for published in self._kept:
            await client.unload_adapter(published.name)

    async def _load(self, client: VllmClient, published: Published) -> None:
        try:
            await client.load_adapter(published.name, published.folder)
        except EngineError as error:  # no other one has ever had this name
            if "already been loaded" not in str(error):
                raise


class WeightsPublisher:
    """All weights, an adapter merged into them if there is one, into a server that goes on."""

    def __init__(self, trainee: Trainee, root: Path, executor: Executor) -> None:
        self.model, self.version = BASE, 0
        self._trainee = trainee
        self._folders = _Folders(root, executor)
        self._kept: list[Published] = []

    async def write(self, version: int) -> Published:
        return await self._folders.write(version, self._trainee.write_weights)

    def adopt(self, published: Published) -> None:
        self._kept.append(published)

    async def send(self, client: VllmClient, published: Published) -> None:
        await client.reload_weights(published.folder, str(published.version))
        self.version = published.version

    async def restore(self, client: VllmClient) -> None:
        if self._kept:
            await self.send(client, self._kept[-1])

    async def retire(self, client: VllmClient) -> None:
        while len(self._kept) > MOST_WEIGHTS_KEPT:
            await asyncio.to_thread(shutil.rmtree, self._kept.pop(0).folder, True)

    async def withdraw(self, client: VllmClient) -> None:
        """Weights that were read need no files."""
