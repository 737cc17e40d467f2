"""A server in a container of the official image. Not in `launch.py`, because it takes a guard."""

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.install import INSIDE
from openenv_pipe.engines.vllm.launch import (
    MODULE,
    OWN_ADDRESS,
    POLL_S,
    end_of,
    pick_port,
    stop_quietly,
)
from openenv_pipe.engines.vllm.server_command import ServerSpec, server_arguments, server_variables
from openenv_pipe.errors import ConfigError, EngineError
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.process_id import ProcessId

GUARD_LIMIT_S = 30.0
CONTAINER_PORT = 8000
HUB_CACHE = "/root/.cache/huggingface"  # in the container


class VllmContainer:
    """A container of the official image, run by the `docker` command. A guard removes it when we
    die; `openenv-pipe hosts` lists it."""

    def __init__(
        self, spec: ServerSpec, config: VllmEngineConfig, log: Path, folders: Sequence[Path]
    ) -> None:
        """`folders` are seen in the container under the same names."""
        self.url = ""
        self.log: Path | None = log
        self._spec = spec
        self._config = config
        self._folders = folders
        self._process: ManagedProcess | None = None
        self._guard: ManagedProcess | None = None

    async def start(self) -> None:
        if shutil.which("docker") is None:
            raise ConfigError(
                "engine.launch=docker needs the `docker` command, which is not on PATH; install "
                "it, or set engine.launch=managed"
            )
        assert self.log is not None
        port = pick_port(self._config, self._spec.number)
        self.url = f"http://{OWN_ADDRESS}:{port}"
        label = owner_label()
        self._guard = await _guarded(label, self.log)
        self._process = ManagedProcess(
            docker_command(self._spec, self._config, self._folders, port, label, self.log.parent),
            log=self.log,
            environment=os.environ,
        )

    async def died(self) -> str:
        assert self._process is not None
        return await end_of(self._process)

    async def stop(self) -> None:
        """The guard removes the container, whatever became of `docker run`."""
        if self._process is not None:
            await stop_quietly(self._process, self._config.stop_timeout_s)
        if self._guard is not None:
            await stop_quietly(self._guard, GUARD_LIMIT_S)


def docker_command(
    spec: ServerSpec,
    config: VllmEngineConfig,
    folders: Sequence[Path],
    port: int,
    label: str,
    logs: Path,
) -> list[str]:
    """`docker run` of one server, which is reached on the loopback interface only."""
    inside = "/openenv-pipe"
    variables = server_variables(spec, config, inside)
    return [
        *("docker", "run", "--rm", "--init", "--ipc=host"),
        *(("--gpus=all",) if spec.build == "cuda" else ()),
        *("--label", f"openenv-pipe.owner={label}", "--label", f"openenv-pipe.logs={logs}"),
        *("--publish", f"{OWN_ADDRESS}:{port}:{CONTAINER_PORT}"),
        *("--volume", f"{INSIDE}:{inside}:ro"),
        *(f"--volume={folder}:{folder}:ro" for folder in folders),
        *(("--volume", f"{hub_cache()}:{HUB_CACHE}") if not Path(spec.model).is_dir() else ()),
        *(f"--env={name}={value}" for name, value in variables.items()),
        *("--entrypoint", "python3", config.image, "-m", MODULE),
        *server_arguments(spec, config, "0.0.0.0", CONTAINER_PORT),
    ]


def hub_cache() -> Path:
    """Where downloads of the model hub are, so that a container need not repeat them."""
    return Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()


def owner_label() -> str:
    """Names this process, as `openenv-pipe hosts` reads it, and this container alone: what ends
    the environments' containers leaves it be."""
    owner = ProcessId.of_this_process().model_dump()
    return json.dumps({**owner, "engine": uuid.uuid4().hex[:12]})


async def _guarded(label: str, log: Path) -> ManagedProcess:
    """The process that removes containers with this label when we end it, or have died."""
    folder = Path(tempfile.mkdtemp(prefix="openenv-pipe-vllm-"))
    guard = ManagedProcess(
        [sys.executable, "-m", "openenv_pipe.environments.hosts.docker.guard", label, str(folder)],
        log=log.with_name("engine-guard.log"),
        environment=os.environ,
        grace_s=GUARD_LIMIT_S,
    )
    deadline = time.monotonic() + GUARD_LIMIT_S
    while not (folder / "guarded").exists():
        if not guard.alive or time.monotonic() > deadline:
            await stop_quietly(guard, 0.0)
            raise EngineError("nothing would remove the container", guard.log)
        await asyncio.sleep(POLL_S)
    return guard
