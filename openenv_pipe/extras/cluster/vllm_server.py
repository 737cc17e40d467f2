"""A vLLM server on a node of a Ray cluster.

Ray runs `NodeProcess` as an actor on the node. It starts the server, and keeps the folder of the
files that the run sends; both end with the actor, also if it is killed, and the actor ends with the
run. `RemoteVllmServer` is the run's side: requests go to the server directly; files and its log
pass through Ray. A server that is lost is started on any node with room.
"""

import asyncio
import itertools
import os
import platform
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.answers import ServerGoneError
from openenv_pipe.engines.vllm.client import Files
from openenv_pipe.engines.vllm.installed import Build, Installed, require_installed
from openenv_pipe.engines.vllm.launch import VllmProcess
from openenv_pipe.engines.vllm.server_command import ServerSpec
from openenv_pipe.engines.vllm.servers import log_of
from openenv_pipe.engines.vllm.weights_folder import weights_folder
from openenv_pipe.errors import ConfigError, EngineError, EngineMissingError, FailureError
from openenv_pipe.extras.cluster.nodes import Nodes, PlacedProcess, WorkerLostError, connected
from openenv_pipe.extras.cluster.schema import RayClusterConfig
from openenv_pipe.system.child_environment import adopt_variables, inherited_variables
from openenv_pipe.system.process import KILL_MARGIN_S
from openenv_pipe.system.secrets import new_key, remember_secrets

LOG = "engine.log"
MAX_LOG_BYTES = 1 << 20  # of one answer
PART_BYTES = 16 * 2**20  # of a file, in one call
LOG_POLL_S = 0.5
STOP_MARGIN_S = 10.0  # for the answer, on top of the time in which the server has to end


class RemoteVllmServer:
    """A `launch.VllmServer` on any node with room; the run's side."""

    def __init__(
        self,
        spec: ServerSpec,
        config: VllmEngineConfig,
        settings: RayClusterConfig,
        *,
        is_written: bool,
        log: Path,
    ) -> None:
        """Prepare the server without placing it.

        is_written: the run has written the model's folder, so no node has it.
        log: the file on this machine into which the server's log is copied.
        """
        self.url = ""
        self.left_out = ""  # its log is on the node
        self.key = new_key("a vLLM server")
        self.log = log
        self.files: Files | None = None
        self.about: dict[str, Any] = {}
        self.node = ""  # its name, after `place`
        self._spec = spec
        self._config = config
        self._settings = settings
        self._is_written = is_written
        self._cluster: Nodes | None = None
        self._process: PlacedProcess | None = None
        self._log_size = 0  # bytes of the node's log that were copied
        self._copying = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """See `VllmServer.start`. Waits up to `cluster.start_timeout_s` for a node with room."""
        spec, needed = self._spec, None
        try:
            process = await self.place()
            if self._is_written:
                assert self.files is not None
                spec = replace(spec, model=str(await self.files.send(Path(spec.model))))
            elif Path(spec.model).is_dir():
                needed = Path(spec.model)
            self.url = await process.call("start", spec, needed)
        except (WorkerLostError, ServerGoneError) as error:
            await self.stop()
            raise EngineError(str(error), self.log) from error
        except BaseException:
            await self.stop()
            raise
        self._log_size = 0
        self._following = asyncio.create_task(self._follow_log(process))

    async def place(self) -> PlacedProcess:
        """Find a node with room and vLLM, without starting the server.

        Raises HostError, ConfigError and WorkerLostError.
        """
        settings, on_gpu = self._settings, self._spec.build == "cuda"
        num_gpus = settings.gpus_per_vllm_server if on_gpu else 0
        self._cluster = await connected(settings.address)
        process = self._cluster.place(
            NodeProcess,
            *(self._config, Path.cwd(), self.key, inherited_variables(self._config.variables)),
            num_cpus=settings.cpus_per_vllm_server,
            num_gpus=num_gpus,
            elsewhere=True,
            name=f"vLLM server {self._spec.number}",
        )
        try:
            needs = f"cluster.cpus_per_vllm_server={settings.cpus_per_vllm_server:g}"
            self.node = await self._cluster.wait_for_node(
                process,
                settings.start_timeout_s,
                needs=f"{needs} and {num_gpus} GPUs" if on_gpu else needs,
                advice="engine.num_servers or cluster.rollout_workers",
            )
            process.name += f", on node {self.node},"
            installed, folder = await process.call(
                "prepare", self._spec.build, self._spec.sees_images
            )
        except BaseException:
            process.kill()
            raise
        self._process = process
        self.files = NodeFiles(process, folder)
        self.about.update(vllm=installed.version, packages=dict(installed.packages))
        return process

    async def died(self) -> str:
        """See `RestartableServer.died`; a server whose node is lost is dead as well."""
        assert self._process is not None
        process = self._process
        try:
            cause = await process.call("died")
            await self._copy_log(process)
        except WorkerLostError as error:
            return str(error)
        return str(cause)

    async def stop(self) -> None:
        process, self._process, self.files = self._process, None, None
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
            self._following = None
        if process is not None:
            limit_s = self._config.stop_timeout_s + KILL_MARGIN_S + STOP_MARGIN_S
            with suppress(TimeoutError, FailureError):
                async with asyncio.timeout(limit_s), self._copying:
                    while await self._append(await process.call("read_log", self._log_size)):
                        pass
                    await self._append(await process.call("stop", self._log_size))
            process.kill()
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.close)
            self._cluster = None

    async def _follow_log(self, process: PlacedProcess) -> None:
        with suppress(FailureError):  # the node is lost, which `died` reports
            while True:
                await self._copy_log(process)
                await asyncio.sleep(LOG_POLL_S)

    async def _copy_log(self, process: PlacedProcess) -> None:
        async with self._copying:
            await self._append(await process.call("read_log", self._log_size))

    async def _append(self, content: bytes) -> bool:
        """Append to this machine's log, and return whether there was something."""
        if content:
            self._log_size += len(content)  # first: a thread writes on if it is not waited for
            await asyncio.to_thread(_write, self.log, content, "ab")
        return bool(content)


def remote_servers(
    settings: RayClusterConfig,
    config: VllmEngineConfig,
    spec: ServerSpec,
    *,
    logs: Path,
    weights_dir: Path,
) -> list[RemoteVllmServer]:
    """Make servers that Ray places on nodes, each with its GPUs or cores; see `MakeOnNodes`."""
    # On a CPU, vLLM would bind its threads to cores that other processes of the node may have.
    cores = {"OMP_NUM_THREADS": f"{max(1, int(settings.cpus_per_vllm_server))}"}
    placement = {} if spec.build == "cuda" else {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **cores}
    specs = [replace(spec, number=n, placement=placement) for n in range(config.num_servers)]
    is_written = Path(spec.model).is_relative_to(weights_dir)
    return [
        RemoteVllmServer(
            each, config, settings, is_written=is_written, log=log_of(each, config, logs)
        )
        for each in specs
    ]


class NodeFiles:
    """Copies folders of this machine to the node of a vLLM server, as a `client.Files`."""

    def __init__(self, process: PlacedProcess, root: Path) -> None:
        self._process = process
        self._root = root
        self._numbers = itertools.count()

    async def send(self, folder: Path) -> Path:
        name = f"{folder.name}-{next(self._numbers)}"  # a folder that is sent again gets another
        for path in sorted(folder.rglob("*")):
            if not path.is_file():
                continue
            target, is_first = f"{name}/{path.relative_to(folder)}", True
            with path.open("rb") as file:
                while (part := await asyncio.to_thread(file.read, PART_BYTES)) or is_first:
                    await self._call("write", target, part, is_first)
                    is_first = False
        return self._root / name

    async def remove(self, folder: Path) -> None:
        await self._call("remove", folder.name)

    async def _call(self, method: str, *arguments: Any) -> None:
        try:
            await self._process.call(method, *arguments)
        except WorkerLostError as error:
            raise ServerGoneError(str(error)) from error
        except FailureError as error:
            raise EngineError(f"files cannot be sent to {self._process.name}: {error}") from error


class NodeProcess:
    """Starts and ends one server. All methods are called on one event loop."""

    def __init__(
        self, config: VllmEngineConfig, cwd: Path, key: str, inherited: Mapping[str, str]
    ) -> None:
        """Prepare this process.

        cwd: the run's folder, used where this node has it.
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

    async def prepare(self, build: Build, sees_images: bool) -> tuple[Installed, Path]:
        """Look for vLLM, and make the folder of sent files; return both. Raises ConfigError."""
        try:
            self._installed = require_installed(build, sees_images=sees_images)
        except EngineMissingError as error:
            raise ConfigError(f"the node {platform.node()}: {error}") from None
        self._folder = self._closing.enter_context(weights_folder(self._config.weights_dir))
        return self._installed, self._folder

    async def write(self, name: str, content: bytes, is_first: bool) -> None:
        await asyncio.to_thread(_write, self._folder / name, content, "wb" if is_first else "ab")

    async def remove(self, name: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder / name, ignore_errors=True)

    async def start(self, spec: ServerSpec, needed: Path | None) -> str:
        """Begin to start the server, and return its URL, as the run's machine reaches it.

        needed: the model's folder, if the run did not send it. Raises ConfigError.
        """
        if needed is not None and not needed.is_dir():
            raise ConfigError(
                f"the node {platform.node()} does not have the folder model.path={needed}; copy it "
                "to every node, under the same path, or name a model of the Hugging Face Hub"
            )
        address = await asyncio.to_thread(lambda: Nodes("auto").own_address())
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
        assert self._server is not None
        return await self._server.died()

    async def read_log(self, offset: int) -> bytes:
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
