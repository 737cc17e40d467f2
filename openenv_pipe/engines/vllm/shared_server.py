"""A vLLM server that the runs of one process use one after another: a run's side and the owner's.

A run finds a shared server as if it were new. There is one exception: if all weights are published,
the server has those of the previous run until the first publish. The owner does not restart a dead
server; a run that requests a server again, within its own restart budget, gets a new one.
Containers are not shared, because a container sees only the folders that it was started with.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.client import Files, VllmClient
from openenv_pipe.engines.vllm.install import find_installed
from openenv_pipe.engines.vllm.launch import VllmProcess, VllmServer
from openenv_pipe.engines.vllm.server_command import ServerSpec
from openenv_pipe.engines.vllm.servers import ManagedLaunch
from openenv_pipe.engines.vllm.supervisor import VllmSupervisor
from openenv_pipe.errors import ConfigError, EngineError, FailureError, PipeError
from openenv_pipe.system.server_lease import Lessor, ServerLease

LOG = "engine.log"
HEALTH_LIMIT_S = 10.0
POLL_S = 0.05


def leased_processes(launch: ManagedLaunch, lessor: Lessor) -> list[VllmServer]:
    """Make servers that are leased when they are started."""
    spec = launch.specs[0]  # the others differ only in number and placement
    digest = model_digest(
        spec,
        written=Path(spec.model).is_relative_to(launch.weights_dir),
        weights_matter=bool(spec.lora_rank),
    )
    return [LeasedVllmServer(each, launch.config, digest, lessor) for each in launch.specs]


class LeasedVllmServer:
    """A `launch.VllmServer` that is leased. `start` fills `about` with facts from the owner."""

    files: Files | None = None
    left_out = ""

    def __init__(
        self, spec: ServerSpec, config: VllmEngineConfig, model_digest: str, lessor: Lessor
    ) -> None:
        """model_digest: see `model_digest`."""
        self.url = ""
        self.key: str | None = None  # of the leased server
        self.log: Path | None = None
        self.about: dict[str, JsonValue] = {}
        self._wanted = {
            "spec": asdict(spec),
            "config": config.model_dump(mode="json", exclude={"api_key"}) | {"api_key": None},
            "model": model_digest,
        }
        self._lessor = lessor
        self._lease: ServerLease | None = None

    async def start(self) -> None:
        """See `VllmServer.start`. A leased server already answers requests."""
        self._lease = await self._lessor.lease("vllm", self._wanted)
        (self.url,) = self._lease.urls
        self.key = self._lease.key
        self.about.update(self._lease.facts["shared_servers"])
        self.log = Path(self._lease.facts["shared_servers"]["logs"]) / LOG

    async def died(self) -> str:
        assert self._lease is not None
        while self._lease.failure is None:
            await asyncio.sleep(POLL_S)
        return str(self._lease.failure).partition("\n")[0]

    async def stop(self) -> None:
        """Release the lease. The owner stops a server that no longer answers."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


def model_digest(spec: ServerSpec, *, written: bool, weights_matter: bool) -> str:
    """Return a digest that is equal for models that the same server can serve.

    Args:
        written: True if the model is a folder that this run wrote, so that its content is
            compared. Otherwise its name and revision are.
        weights_matter: False if the first publish replaces all weights.
    """
    if not written:
        return f"{spec.model}@{spec.revision}"
    digest = hashlib.sha256()
    for file in sorted(Path(spec.model).iterdir()):
        if weights_matter or file.suffix != ".safetensors":
            digest.update(
                f"{file.name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode()
            )
    return digest.hexdigest()


class SharedVllmServer:
    """One server that its owner leases to one run after another."""

    def __init__(self, wanted: Mapping[str, Any], logs: Path) -> None:
        """Prepare a server without starting it.

        Args:
            wanted: the first run's request, see `LeasedVllmServer`.

        Raises:
            ConfigError: vLLM is no longer installed.
        """
        spec, config = (
            ServerSpec(**wanted["spec"]),
            VllmEngineConfig.model_validate(wanted["config"]),
        )
        installed = find_installed(spec.build)
        if installed is None:
            raise ConfigError(f"the environment of vLLM ({spec.build}) was removed")
        self._server = VllmProcess(spec, config, installed.python, logs / LOG)
        once = config.model_copy(update={"max_restarts": 0})
        self._supervisor = VllmSupervisor(
            self._server, once, restore=_restore_nothing, tell=lambda _: None
        )
        self._started = False

    @property
    def urls(self) -> Sequence[str]:
        return [self._server.url]

    @property
    def failure(self) -> FailureError | None:
        """The error of a server that has died; None while it lives."""
        if self._started and self._supervisor.client is None:
            return EngineError("the server died", self._server.log)
        return None

    @property
    def key(self) -> str | None:
        return self._server.key

    def facts(self) -> dict[str, JsonValue]:
        """There are none."""
        return {}

    async def start(self) -> None:
        """Start the server and wait until it has answered a request. Raises EngineError."""
        await self._supervisor.start()
        self._started = True

    async def clear(self) -> None:
        """Remove what a run left behind: a pause, adapters, cached prefixes, running requests.

        Raises:
            EngineError: the server does not answer, or refuses.
        """
        client = self._supervisor.client
        try:
            if client is None or not await client.is_healthy(HEALTH_LIMIT_S):
                raise EngineError("the server does not answer", self._server.log)
            await client.resume()
            for name in await client.adapters():
                await client.unload_adapter(name)
            await client.reset_prefix_cache()
        except PipeError:
            raise
        except Exception as error:  # after any error, of HTTP or JSON, it cannot be shared
            raise EngineError(f"the server cannot be cleared: {error!r}") from error

    async def close(self) -> None:
        """Stop the server within a time limit. Repeating it does no harm."""
        await self._supervisor.close()


async def _restore_nothing(_: VllmClient) -> None:
    """Leave the server without a policy: each run that leases it publishes its own."""
