"""How a version of the policy gets to a server: as files of an adapter, or of all weights.

No file that a server may still read is changed.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from openenv_pipe.engines.vllm.answers import ServerGoneError
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.connection import weights_limit_s
from openenv_pipe.engines.vllm.server_command import MAX_ADAPTERS
from openenv_pipe.errors import EngineError
from openenv_pipe.system.tasks import in_thread

if TYPE_CHECKING:
    from openenv_pipe.models.weights import PolicyWeights

MAX_WEIGHTS_FOLDERS = 2  # a server that is being restarted may still read the previous version


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyVersion:
    step: int  # of GRPO, that the weights come from
    name: str
    model: str  # its name in requests
    label: str  # of all weights of this version, see `ownership.py`
    expected: np.ndarray = field(repr=False, compare=False)  # [P, V], for the logprob check


class Transfer:
    """A way to bring versions of the policy to servers. The defaults keep no old versions.

    Methods with a client raise EngineError and ServerGoneError.
    """

    sends_adapters = False  # and not all weights
    num_loaded = 1  # versions that a server has at once
    num_kept = 1  # versions that can be sent

    async def write(self, version: PolicyVersion) -> None:
        """Prepare the policy as it is now for sending."""
        raise NotImplementedError

    async def send(self, client: VllmClient, version: PolicyVersion, *, paused: bool) -> None:
        """Give a server a version of the policy. Repeating it does no harm.

        paused: the server takes no requests at present, and is left so.
        """
        raise NotImplementedError

    def begin_update(self) -> None:
        """Take note that the policy changes from now on, until the next `write`."""

    async def wait_until_readable(self) -> None:
        """Return when the latest version can be sent."""

    def can_read(self, version: PolicyVersion) -> bool:
        """Whether a version that was not dropped can be sent now."""
        return True

    async def drop(self, clients: Sequence[VllmClient], version: PolicyVersion) -> None:
        """Remove a version from servers, and then its files."""

    async def withdraw(self, client: VllmClient, versions: Sequence[PolicyVersion]) -> None:
        """Remove this run's versions from a server that keeps running after the run."""

    async def clear(self, client: VllmClient) -> None:
        """Remove the versions of killed runs that the next version does not replace on a server."""

    def close(self) -> None:
        """Free this side's resources. Nothing can be sent afterwards."""


class _Files(Transfer):
    def __init__(self, write: Callable[[Path], None], root: Path, executor: Executor) -> None:
        """Prepare to write versions.

        write: writes the policy as it is into a folder; it is called in torch's thread.
        root: the folder of all versions, which the caller removes.
        executor: torch's thread.
        """
        self._write = write
        self._root = root
        self._executor = executor

    async def write(self, version: PolicyVersion) -> None:
        folder = self._folder(version)
        folder.mkdir()
        await in_thread(self._executor, self._write, folder)

    def _folder(self, version: PolicyVersion) -> Path:
        return self._root / version.name


class AdapterFiles(_Files):
    """LoRA adapters in folders, each under a name of its own.

    A server keeps the last few, so that a request ends with the adapter it began with.
    """

    sends_adapters = True
    num_loaded = num_kept = MAX_ADAPTERS

    async def send(self, client: VllmClient, version: PolicyVersion, *, paused: bool) -> None:
        folder = self._folder(version)
        try:
            await client.load_adapter(version.name, folder)
        except EngineError as error:
            if "already been loaded" not in str(error):
                raise
            if not await client.has_adapter(version.name, folder):
                raise EngineError(
                    f"{client.url} has another adapter under the name {version.name}, which only "
                    "this run uses: somebody has replaced it"
                ) from error

    async def drop(self, clients: Sequence[VllmClient], version: PolicyVersion) -> None:
        """Unload an adapter, then delete its files.

        A server may drop a loaded adapter to make room and read it again, and dies if the file is
        gone by then.
        """
        unloading = (client.unload_adapter(version.name) for client in clients)
        results = await asyncio.gather(*unloading, return_exceptions=True)
        failures = [each for each in results if each is not None]
        for failure in failures:
            # A server that is gone does not get this adapter again after its restart.
            if not isinstance(failure, ServerGoneError):
                raise failure
        if not failures:
            await asyncio.to_thread(shutil.rmtree, self._folder(version), True)

    async def withdraw(self, client: VllmClient, versions: Sequence[PolicyVersion]) -> None:
        for version in versions:
            await client.unload_adapter(version.name)

    async def clear(self, client: VllmClient) -> None:
        """Unload adapters of dead runs, which are those whose files are gone.

        A living run keeps an adapter's files until the server has unloaded it.
        """
        for name, folder in (await client.adapters()).items():
            run = folder.parent
            is_of_a_run = run.parent == self._root.parent and name.startswith(f"{run.name}-")
            if is_of_a_run and not await asyncio.to_thread(folder.exists):
                await client.unload_adapter(name)


class WeightFiles(_Files):
    """All weights in a folder, with an adapter merged into them if there is one."""

    num_kept = MAX_WEIGHTS_FOLDERS

    async def send(self, client: VllmClient, version: PolicyVersion, *, paused: bool) -> None:
        own = self._folder(version)
        num_bytes = await asyncio.to_thread(lambda: sum(f.stat().st_size for f in own.iterdir()))
        async with client.readable(own) as folder, replacing_weights(client, paused=paused):
            await client.load_weights(folder, version.label, weights_limit_s(num_bytes))

    async def drop(self, clients: Sequence[VllmClient], version: PolicyVersion) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder(version), True)


def build_files(
    weights: "PolicyWeights", root: Path, executor: Executor, backend: str | None
) -> WeightFiles:
    return WeightFiles(weights.write_weights, root, executor)


def replacing_weights(client: VllmClient, *, paused: bool) -> AbstractAsyncContextManager[None]:
    """Do as `VllmClient.replacing_weights`, but nothing if the server is paused already."""
    return nullcontext() if paused else client.replacing_weights()
