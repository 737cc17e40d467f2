"""A vLLM server on a node of a cluster, and the folder of the files that the run sends to it.

Ray runs `NodeServer` as an actor, which ends with the run; the server's process and the folder end
with the actor, also if it is killed. `placed_server.py` is the run's side.
"""

import asyncio
import os
import platform
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.install import Build, Installed, require_installed
from openenv_pipe.engines.vllm.launch import VllmProcess
from openenv_pipe.engines.vllm.server_command import ServerSpec
from openenv_pipe.engines.vllm.weights_folder import weights_folder
from openenv_pipe.errors import ConfigError, EngineMissingError
from openenv_pipe.system.child_environment import adopt_variables
from openenv_pipe.system.ray_cluster import RayCluster
from openenv_pipe.system.secrets import remember_secrets

LOG = "engine.log"
MAX_LOG_BYTES = 1 << 20  # of one answer


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """What a node reports before its server starts."""

    installed: Installed
    folder: Path  # of the files that are sent


class NodeServer:
    """Starts and ends one server. All methods are called on one event loop."""

    def __init__(
        self, config: VllmEngineConfig, cwd: Path, key: str, inherited: Mapping[str, str]
    ) -> None:
        """Prepare this process.

        Args:
            cwd: the run's folder, used where this node has it.
            key: of the server.
            inherited: the variables that `engine.variables` passes on from the run's process.
        """
        adopt_variables(inherited)
        remember_secrets({key: "the key of a vLLM server"})  # not to be shown by the log
        self._key = key
        if cwd.is_dir():
            os.chdir(cwd)  # relative paths of the configuration mean the same files
        self._config = config
        self._closing = ExitStack()
        self._folder = Path()
        self._installed: Installed
        self._server: VllmProcess | None = None

    async def node(self) -> str:
        """Return the name of the node. The first call returns when the process runs."""
        return platform.node()

    async def prepare(self, build: Build, sees_pictures: bool) -> NodeFacts:
        """Look for vLLM, and make the folder of sent files. Raises ConfigError."""
        try:
            self._installed = require_installed(build, sees_pictures=sees_pictures)
        except EngineMissingError as error:
            raise ConfigError(f"the node {platform.node()}: {error}") from None
        self._folder = self._closing.enter_context(weights_folder(self._config.weights_dir))
        return NodeFacts(installed=self._installed, folder=self._folder)

    async def write(self, name: str, content: bytes, is_first: bool) -> None:
        """Write a part of a file. name: its path in the folder. is_first: the file is new."""
        await asyncio.to_thread(_write, self._folder / name, content, "wb" if is_first else "ab")

    async def remove(self, name: str) -> None:
        """Remove one of the folders with sent files."""
        await asyncio.to_thread(shutil.rmtree, self._folder / name, ignore_errors=True)

    async def start(self, spec: ServerSpec, needed: Path | None) -> str:
        """Begin to start the server, and return its URL, as the run's machine reaches it.

        Args:
            needed: the model's folder, if the run did not send it.

        Raises:
            ConfigError: the folder is not on this node, or `engine.port` is taken.
        """
        if needed is not None and not needed.is_dir():
            raise ConfigError(
                f"the node {platform.node()} does not have the folder model.path={needed}; copy it "
                "to every node, under the same path, or name a model of the Hugging Face Hub"
            )
        address = await asyncio.to_thread(lambda: RayCluster("auto").own_address())
        self._server = VllmProcess(
            spec,
            self._config,
            self._installed.python,
            self._folder / LOG,
            address=address,
            key=self._key,
        )
        await self._server.start()
        return self._server.url

    async def died(self) -> str:
        """Return when the server is dead, with the cause in words."""
        assert self._server is not None
        return await self._server.died()

    async def read_log(self, offset: int) -> bytes:
        """Return what the server has written to its log after the first `offset` bytes."""
        return await asyncio.to_thread(_read, self._folder / LOG, offset)

    async def stop(self, offset: int) -> bytes:
        """Stop the server, remove all files, and return the rest of the log, as `read_log`."""
        if self._server is not None:
            await self._server.stop()
        rest = await self.read_log(offset)
        await asyncio.to_thread(self._closing.close)
        return rest


def _write(path: Path, content: bytes, mode: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.write(content)


def _read(path: Path, offset: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(MAX_LOG_BYTES)
