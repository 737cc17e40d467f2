"""vLLM servers in containers of the official image."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.client import Files
from openenv_pipe.engines.vllm.launch import MODULE, OWN_ADDRESS, pick_port
from openenv_pipe.engines.vllm.server_command import (
    HUB_CACHE,
    INSIDE_CONTAINER,
    KEY_VARIABLE,
    MOUNTS,
    VARIABLES,
    ServerSpec,
    hub_cache,
    server_arguments,
    server_variables,
)
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.containers.docker.start_guard import (
    GUARD_LIMIT_S,
    owner_label,
    start_guard,
    wait_for_guard,
)
from openenv_pipe.system.child_environment import DOCKER, child_environment
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.secrets import new_key

CONTAINER_PORT = 8000


class VllmContainer:
    """A container of the official image, run by the `docker` command.

    A guard process removes the container when this process ends or dies.
    """

    files: Files | None = None
    left_out = ""

    def __init__(
        self, spec: ServerSpec, config: VllmEngineConfig, log: Path, folders: Sequence[Path]
    ) -> None:
        """folders: these are mounted in the container under the same paths, read-only."""
        self.url = ""
        self.about: dict[str, Any] = {}
        self.key = new_key("a vLLM server")
        self.log = log
        self._spec = spec
        self._config = config
        self._folders = folders
        self._process: ManagedProcess | None = None
        self._guard: ManagedProcess | None = None

    async def start(self) -> None:
        check_launch(self._config)
        port = pick_port(self._config, self._spec.number)
        self.url = f"http://{OWN_ADDRESS}:{port}"
        label = owner_label()
        folder = Path(tempfile.mkdtemp(prefix="openenv-pipe-vllm-"))
        self._guard = start_guard(label, folder, self.log.with_name("engine-guard.log"))
        await wait_for_guard(self._guard, folder)
        variables = server_variables(self._spec, self._config, INSIDE_CONTAINER)
        file = folder / "variables"
        file.touch(0o600)
        file.write_text(variables_file({**variables, KEY_VARIABLE: self.key}))
        self._process = ManagedProcess(
            docker_command(
                self._spec, self._config, self._folders, port, label, self.log.parent, file
            ),
            log=self.log,
            environment=child_environment(*DOCKER),
        )

    async def died(self) -> str:
        assert self._process is not None
        return await self._process.exited()

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stopped(self._config.stop_timeout_s)
        if self._guard is not None:
            await self._guard.stopped(GUARD_LIMIT_S)


def check_launch(config: VllmEngineConfig) -> str:
    """Return what is started. Raises ConfigError if there is no `docker` command."""
    if shutil.which("docker") is None:
        raise ConfigError(
            "engine.launch=docker needs the `docker` command, which is not on PATH; install it, or "
            "set engine.launch=managed"
        )
    return f"a container of {config.image}"


def docker_command(
    spec: ServerSpec,
    config: VllmEngineConfig,
    folders: Sequence[Path],
    port: int,
    label: str,
    logs: Path,
    variables: Path,
) -> list[str]:
    """Return the `docker run` command of one server, published on the loopback interface only.

    variables: the file with its environment, because `ps` shows arguments to everybody.
    """
    return [
        *("docker", "run", "--rm", "--init", "--ipc=host"),
        *(("--gpus=all",) if spec.build == "cuda" else ()),
        *("--label", f"openenv-pipe.owner={label}", "--label", f"openenv-pipe.logs={logs}"),
        *("--publish", f"{OWN_ADDRESS}:{port}:{CONTAINER_PORT}"),
        *(f"--volume={folder}:{inside}:ro" for folder, inside in MOUNTS.items()),
        *(f"--volume={folder}:{folder}:ro" for folder in folders),
        *(("--volume", f"{hub_cache()}:{HUB_CACHE}") if not Path(spec.model).is_dir() else ()),
        *("--env-file", str(variables)),
        *("--entrypoint", "python3", config.image, "-m", MODULE),
        *server_arguments(spec, config, "0.0.0.0", CONTAINER_PORT),
    ]


def variables_file(variables: Mapping[str, str]) -> str:
    """Return the content of a file for --env-file, one variable a line. Raises ConfigError."""
    for name, value in variables.items():
        if "\n" in value:
            raise ConfigError(
                f"{VARIABLES}.{name} has several lines, which `docker run` cannot pass on without "
                "showing the value to all users of this machine; expected a single line"
            )
    return "".join(f"{name}={value}\n" for name, value in variables.items())
