"""A judge's model in a vLLM server that starts at the first request and ends with the judge."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from openenv_pipe.engines.openai import ChatClient
from openenv_pipe.engines.vllm.endpoint import Served, running, serving_arguments
from openenv_pipe.engines.vllm.installed import find_build, require_installed
from openenv_pipe.errors import EngineError, JudgeError
from openenv_pipe.extras.judges.schema import VllmJudgeConfig
from openenv_pipe.system.child_environment import given_variables
from openenv_pipe.system.process import ManagedProcess, free_port
from openenv_pipe.system.secrets import new_key

HOST = "127.0.0.1"
VARIABLES = "judge.variables"
_log = logging.getLogger(__name__)


def check_judge_server(config: VllmJudgeConfig) -> None:
    require_installed(find_build())


class VllmJudgeClient:
    """The client of a server of its own. Use it in `async with`.

    A run whose answers are all there already, such as a reproduction, starts no server.
    """

    def __init__(self, config: VllmJudgeConfig, log: Path) -> None:
        self.url = f"vllm:{config.model}@{config.revision}"  # ports differ from run to run
        self._config = config
        self._log = log
        self._stack = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._client: ChatClient | None = None
        self._server: ManagedProcess | None = None

    async def __aenter__(self) -> "VllmJudgeClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def complete(self, body: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
        """Return the server's JSON for this body; the first call starts the server.

        Raises RequestRejectedError, EngineError and JudgeError.
        """
        async with self._starting:
            if self._client is None:
                self._client = await self._start()
        try:
            return await self._client.complete(body, num_tokens)
        except EngineError as error:
            assert self._server is not None
            if self._server.alive:
                raise
            raise JudgeError(
                f"the judge's server ended with code {self._server.returncode}", self._log
            ) from error

    async def _start(self) -> ChatClient:
        config = self._config
        installed = require_installed(find_build())
        path = Path(config.model).expanduser()
        served = Served(
            name=config.model,
            model=str(path) if path.is_dir() else config.model,
            revision=config.revision,
            adapter=None,
            lora_rank=0,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            gpu_memory_share=config.gpu_memory_share,
        )
        port, key = free_port(HOST), new_key("a vLLM server")
        arguments = serving_arguments(served, installed.build, HOST, port, config.arguments)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        server = running(
            served,
            installed,
            arguments,
            url=f"http://{HOST}:{port}",
            key=key,
            start_timeout_s=config.start_timeout_s,
            log=self._log,
            notify=lambda text: _log.info("judge's %s", text),
            variables=given_variables(config.variables, VARIABLES),
            variables_key=VARIABLES,
        )
        try:
            self._server = await self._stack.enter_async_context(server)
        except EngineError as error:
            raise JudgeError(f"the judge's server did not start: {error}") from error
        endpoint = config.endpoint(f"http://{HOST}:{port}/v1", key)
        return await self._stack.enter_async_context(ChatClient(endpoint, block="judge"))
