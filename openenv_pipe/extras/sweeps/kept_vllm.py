"""vLLM server processes that a sweep's worker keeps from one job to the next.

A job finds a kept server as if it were new. There is one exception: if all weights are published,
the server has those of the previous job until the first publish. Containers are not kept, because a
container sees only the folders that it was started with.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from openenv_pipe.engines.vllm.answers import ServerGoneError
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.launch import VllmProcess, VllmServer
from openenv_pipe.engines.vllm.server_command import ServerSpec
from openenv_pipe.engines.vllm.servers import ManagedLaunch
from openenv_pipe.errors import EngineError

LOG = "engine.log"
HEALTH_LIMIT_S = 10.0


class KeptProcesses:
    """The servers of the worker's jobs, which run one after another."""

    def __init__(self, logs: Path, report: Callable[[bool], None]) -> None:
        """Keep nothing yet.

        logs: the log of each server goes into a folder below it.
        report: is called for each server of a job, with whether it has to be started.
        """
        self._logs = logs
        self._report = report
        self._servers: dict[str, VllmProcess] = {}  # of the last job, by `_key`

    async def servers(self, launch: ManagedLaunch) -> list[VllmServer]:
        """Return the servers of a job: those of the job before, where they fit.

        The others are stopped first, so that the memory that they take is free.
        """
        digest = await asyncio.to_thread(
            model_digest,
            launch.specs[0],  # the others differ only in number and placement
            written=Path(launch.specs[0].model).is_relative_to(launch.weights_dir),
        )
        before, self._servers = self._servers, {}
        for spec in launch.specs:
            key = _key(spec, launch, digest)
            kept = before.pop(key, None)
            if kept is None:
                log = new_log_folder(self._logs, "vllm") / LOG
                kept = VllmProcess(spec, launch.config, launch.python, log, clear=cleared)
            kept.spec = spec  # the folder of the model is another one
            self._servers[key] = kept
        await _stop(list(before.values()))
        for server in self._servers.values():
            num_jobs_before = server.about.get("num_jobs_before", -1) + 1 if server.alive else 0
            self._report(not server.alive)
            server.about.update(num_jobs_before=num_jobs_before, logs=str(server.log.parent))
        return list(self._servers.values())

    async def close(self) -> None:
        await _stop(list(self._servers.values()))


def new_log_folder(logs: Path, kind: str) -> Path:
    """Make a folder for logs of new servers. Workers before this one may have made some."""
    logs.mkdir(parents=True, exist_ok=True)
    folder = logs / f"{kind}_{len(list(logs.glob(f'{kind}_*'))) + 1}"
    folder.mkdir()
    return folder


async def _stop(servers: list[VllmProcess]) -> None:
    await asyncio.gather(*(server.end() for server in servers))


async def cleared(url: str, key: str) -> bool:
    """Remove what a job has left on a server: a pause, adapters, cached prefixes, and requests.

    Returns whether the server answers, and has lost all of it.
    """
    try:
        async with VllmClient(url, api_key=key, request_timeout_s=HEALTH_LIMIT_S) as client:
            if not await client.is_healthy(HEALTH_LIMIT_S):
                return False
            await client.resume()
            for name in await client.adapters():
                await client.unload_adapter(name)
            await client.reset_prefix_cache()
    except (EngineError, ServerGoneError):
        return False
    return True


def _key(spec: ServerSpec, launch: ManagedLaunch, digest: str) -> str:
    """Return a text that is equal for servers that can replace each other."""
    # The digest of the model's content counts, and not the folder that a run has it in.
    config = launch.config.model_dump(mode="json", exclude={"api_key"})
    return json.dumps([asdict(spec) | {"model": digest}, config], sort_keys=True)


def model_digest(spec: ServerSpec, *, written: bool) -> str:
    """Return a digest that is equal for models that the same server can serve.

    written: True if the model is a folder that this run wrote, so its content is compared.
        Otherwise its name and revision are.
    """
    if not written:
        return f"{spec.model}@{spec.revision}"
    digest = hashlib.sha256()
    for file in sorted(Path(spec.model).iterdir()):
        # Without adapters, the first publish replaces all weights.
        if spec.lora_rank or file.suffix != ".safetensors":
            digest.update(
                f"{file.name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode()
            )
    return digest.hexdigest()
