"""Host `none`: there is no environment, because clients play by rules of their own."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import JsonValue

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.environments.client.session import Session
from openenv_pipe.errors import StepRejectedError
from openenv_pipe.extras.agents.schema import NoHostConfig
from openenv_pipe.system.http import OPEN, Access


class NoHost:
    """Lends sessions whose observation is the task, and which take no steps."""

    num_deaths = 0
    urls: Sequence[str] = ()
    access: Access = OPEN

    def __init__(self, env: EnvConfig, config: NoHostConfig, logs: Path) -> None:
        self.capacity = config.capacity
        self._free = asyncio.Semaphore(config.capacity)

    async def start(self) -> None:
        """Do nothing."""

    def facts(self) -> dict[str, JsonValue]:
        return {}

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        async with self._free:
            yield _TaskSession()

    async def close(self) -> None:
        """Do nothing."""


class _TaskSession(Session):
    """A session without a connection."""

    def __init__(self) -> None:
        self.url = "no environment"

    async def reset(self, keywords: Mapping[str, object], timeout_s: float) -> StepResult:
        return StepResult(dict(keywords), None, False)

    async def step(self, action: Mapping[str, object], timeout_s: float) -> StepResult:
        raise _rejection()

    async def state(self, timeout_s: float) -> dict[str, object]:
        raise _rejection()


def _rejection() -> StepRejectedError:
    return StepRejectedError("VALIDATION_ERROR", "this run has no environment (host=none)")
