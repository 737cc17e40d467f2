"""A managed server between several runs: its keeper's side, which has it, and a run's, which
borrows it.

A run finds it as it would find a new one, but for the base weights where all weights are published:
there it has those of the run before, until the first publish. Refused here: restarts. A dead server
is gone, and a run that asks again, within its own budget, gets a new one. Containers are not kept:
they see no other folders than those that they were started with.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.install import find_installed
from openenv_pipe.engines.vllm.launch import ManagedServer
from openenv_pipe.engines.vllm.server_command import Plan
from openenv_pipe.engines.vllm.supervisor import ServerLife
from openenv_pipe.errors import ConfigError, EngineError, FailureError, PipeError
from openenv_pipe.system.server_lease import Loan

LOG = "engine.log"
HEALTHY_WITHIN_S = 10.0


class BorrowedServer:
    """See `launch.Server`. `about` is filled in when it is borrowed."""

    def __init__(
        self, plan: Plan, config: VllmEngineConfig, model_digest: str, keeper: Path
    ) -> None:
        """model_digest: equal for models that one server can serve. keeper: its socket."""
        self.url = ""
        self.log: Path | None = None
        self.about: dict[str, JsonValue] = {}
        self._request = {
            "vllm": {
                "plan": asdict(plan),
                "config": config.model_dump(mode="json"),
                "model": model_digest,
            }
        }
        self._keeper = keeper
        self._loan: Loan | None = None

    async def start(self) -> None:
        """See `Server.start`. The server it finds has answered already."""
        try:
            self._loan = await Loan.ask(self._keeper, self._request)
        except FailureError as error:
            raise EngineError(str(error)) from error
        (self.url,) = self._loan.urls
        self.about.update(self._loan.facts)
        self.log = Path(self._loan.facts["kept_servers"]["logs"]) / LOG

    async def died(self) -> str:
        assert self._loan is not None
        try:
            await self._loan.news()
        except FailureError as error:
            return str(error).partition("\n")[0]
        return "its keeper says that it listens elsewhere"

    async def stop(self) -> None:
        """Give it back. The keeper ends it if it says nothing any more."""
        if self._loan is not None:
            await self._loan.give_back()


def model_digest(plan: Plan, *, written: bool, weights_matter: bool) -> str:
    """Equal for models that the same server can serve.

    written: the model is a folder that this run has made, known by its content; else it is known by
    its name. weights_matter: not where the first publish replaces all of them.
    """
    if not written:
        return f"{plan.model}@{plan.revision}"
    digest = hashlib.sha256()
    for file in sorted(Path(plan.model).iterdir()):
        if weights_matter or file.suffix != ".safetensors":
            digest.update(
                f"{file.name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode()
            )
    return digest.hexdigest()


class KeptServer:
    """One server that its keeper lends to one run after another."""

    def __init__(self, wanted: dict[str, Any], logs: Path) -> None:
        """Starts nothing yet. wanted: a run's request. Raises ConfigError without an install."""
        plan, config = Plan(**wanted["plan"]), VllmEngineConfig.model_validate(wanted["config"])
        installed = find_installed(plan.build)
        if installed is None:
            raise ConfigError(f"the environment of vLLM ({plan.build}) was removed")
        self._server = ManagedServer(plan, config, installed.python, logs / LOG)
        once = config.model_copy(update={"max_restarts": 0})
        self._life = ServerLife(self._server, once, restore=_nothing, tell=lambda _: None)
        self._started = False

    @property
    def urls(self) -> Sequence[str]:
        return [self._server.url]

    @property
    def failure(self) -> FailureError | None:
        """Set once the server has died."""
        if self._started and self._life.client is None:
            return EngineError("the server died", self._server.log)
        return None

    def facts(self) -> dict[str, JsonValue]:
        """Of the server itself all is in the run's own facts."""
        return {}

    async def start(self) -> None:
        """Return when it has answered a request. Raises EngineError."""
        await self._life.start()
        self._started = True

    async def clear(self) -> None:
        """Take from it what a run has left: a pause, adapters, keys and values, requests under way.

        Raises EngineError if it does not answer.
        """
        client = self._life.client
        try:
            if client is None or not await client.is_healthy(HEALTHY_WITHIN_S):
                raise EngineError("the server does not answer", self._server.log)
            await client.resume()
            for name in await client.adapters():
                await client.unload_adapter(name)
            await client.reset_prefix_cache()
        except PipeError:
            raise
        except Exception as error:  # of HTTP, and what is no JSON: all say that it cannot be kept
            raise EngineError(f"the server cannot be cleared: {error!r}") from error

    async def close(self) -> None:
        """End it. Bounded; may be called again."""
        await self._life.close()


async def _nothing(_: VllmClient) -> None:
    """A server without a policy: the runs that borrow it publish theirs."""
