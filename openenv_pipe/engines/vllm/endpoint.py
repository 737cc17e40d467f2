"""A trained model behind vLLM's own OpenAI endpoint, for agents. Nothing of training is on.

What the server answers with is the model's: its chat template, its generation settings, its tools.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.engines.vllm.client import BASE, VllmClient
from openenv_pipe.engines.vllm.install import Build, Installed
from openenv_pipe.engines.vllm.launch import POLL_S, end_of, server_process, stop_quietly
from openenv_pipe.engines.vllm.server_command import (
    FEWEST_BATCHED_TOKENS,
    allowed_rank,
    process_environment,
)
from openenv_pipe.engines.vllm.start_progress import StartProgress
from openenv_pipe.errors import ConfigError, EngineError
from openenv_pipe.system.http import LOOPBACK
from openenv_pipe.system.process import port_in_use

Tell = Callable[[str], None]
KEY_VARIABLE = "VLLM_API_KEY"  # the server itself reads it
STOP_LIMIT_S = 10.0
CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
CPU_CACHE_GB = "2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A model under its name."""

    name: str  # that requests ask for
    model: str  # a folder, or an id on a hub
    revision: str | None
    adapter: Path | None  # served under the name, with the model below it as `base`
    lora_rank: int
    dtype: str
    max_model_len: int  # tokens of a conversation
    chat_template: Path | None  # None: the model's own
    calls_tools: bool


def serving_arguments(
    served: Served, build: Build, host: str, port: int, extra: Sequence[str]
) -> list[str]:
    """What follows `python -m vllm.entrypoints.openai.api_server`; `extra` stands over ours."""
    arguments = [
        *("--model", served.model, "--dtype", served.dtype),
        *("--max-model-len", str(served.max_model_len)),
        *("--served-model-name", BASE if served.adapter else served.name),
        *("--host", host, "--port", str(port)),
    ]
    if served.revision is not None:
        arguments += ["--revision", served.revision]
    if served.adapter is not None:
        arguments += ["--enable-lora", "--max-lora-rank", str(allowed_rank(served.lora_rank))]
        arguments += ["--lora-modules", f"{served.name}={served.adapter}"]
    if served.chat_template is not None:
        arguments += ["--chat-template", str(served.chat_template)]
    if served.calls_tools:  # the form that the tool adapter reads
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    if build == "cpu":
        longest = str(max(FEWEST_BATCHED_TOKENS, served.max_model_len))
        arguments += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", longest]
    return [*arguments, *extra]


async def serve(
    served: Served,
    installed: Installed,
    *,
    host: str,
    port: int,
    extra: Sequence[str],
    start_timeout_s: float,
    log: Path,
    tell: Tell,
) -> None:
    """Serves until it is cancelled. Raises ConfigError for the port, EngineError when it dies."""
    if host not in LOOPBACK and not os.environ.get(KEY_VARIABLE):
        raise ConfigError(
            f"--host {host} lets others in, and {KEY_VARIABLE} is not set: set it to a secret of "
            "yours, which requests then have to bring, or leave the host at 127.0.0.1"
        )
    if port_in_use(port, host):
        raise ConfigError(f"--port {port} is used by another program; choose another one")
    progress = StartProgress(log, lambda text: tell(f"engine: {text}"))
    arguments = serving_arguments(served, installed.build, host, port, extra)
    environment = process_environment(served.model, _variables(installed.build))
    server = server_process(installed.python, arguments, environment, log)
    try:
        death = asyncio.create_task(end_of(server))
        ready = asyncio.create_task(_until_ready(f"http://{host}:{port}", progress))
        done, _ = await asyncio.wait(
            {death, ready}, timeout=start_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        ready.cancel()
        if not done:
            raise EngineError(f"the server was not ready within {start_timeout_s:g} s", log)
        if ready in done:
            tell(f"serving {served.name} at http://{host}:{port}/v1 until Ctrl-C (log: {log})")
        cause = await death
        raise EngineError(f"the server died: {progress.cause_of_death() or cause}", log)
    finally:
        await asyncio.shield(stop_quietly(server, STOP_LIMIT_S))


async def _until_ready(url: str, progress: StartProgress) -> None:
    key = os.environ.get(KEY_VARIABLE)
    async with VllmClient(url, api_key=key, request_timeout_s=5.0) as client:
        while not await client.is_healthy(5.0):
            progress.look()
            await asyncio.sleep(POLL_S)


def _variables(build: Build) -> dict[str, str]:
    """Beside ours, VLLM_API_KEY included: the server asks for that key if it is set."""
    if build != "cpu":
        return {}
    # Or it takes nearly all memory, whether that is free or not.
    return {CACHE_VARIABLE: os.environ.get(CACHE_VARIABLE, CPU_CACHE_GB)}
