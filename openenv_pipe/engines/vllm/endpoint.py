"""Serve a model at vLLM's own OpenAI endpoint, for agents and for judges. Nothing is trained.

The model's own chat template, generation settings and form of tool calls apply.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.connection import BASE
from openenv_pipe.engines.vllm.installed import Build, Installed, python_path
from openenv_pipe.engines.vllm.launch import server_process
from openenv_pipe.engines.vllm.server_command import (
    FEWEST_BATCHED_TOKENS,
    KEY_VARIABLE,
    allowed_rank,
    process_environment,
)
from openenv_pipe.engines.vllm.server_log import first_error, log_size
from openenv_pipe.errors import ConfigError, EngineError, last_lines
from openenv_pipe.system.child_environment import names_left_out
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.readiness import (
    ATTEMPT_LIMIT_S,
    NotReadyError,
    unless_dead,
    wait_until_healthy,
)

Notify = Callable[[str], None]
STOP_LIMIT_S = 10.0
# The names of vLLM's tool parsers, where they differ from those of the formats here. vLLM has none
# for Nemotron 2, whose calls therefore stay in the text.
TOOL_PARSERS = {
    "cohere": "cohere_command3",
    "deepseek": "deepseek_v31",
    "glm4": "glm45",
    "gpt_oss": "openai",
    "granite3": "granite",
    "llama": "llama3_json",
    "nemotron2": "hermes",
    "phi4": "phi4_mini_json",
    "response_template": "hf",
}
CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
CPU_CACHE_GB = "2"
# Options of the server that decide who may use it, and what sets each of them instead.
OWN_OPTIONS = {
    "--host": "--host, in front of the `--`",
    "--port": "--port, in front of the `--`",
    "--api-key": f"the environment variable {KEY_VARIABLE}",
    "--config": "the single options of that file",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    name: str  # requests name it as their model
    model: str  # a folder, or an id on a model hub
    revision: str | None
    adapter: Path | None  # served as `name`; the model without it is then served as `base`
    lora_rank: int
    dtype: str
    max_model_len: int  # tokens
    chat_template: Path | None = None  # None: the model's own
    call_format: str | None = None  # how replies write calls, as `formats.json`; None: no calls
    gpu_memory_share: float | None = None  # None: vLLM's default


def serving_arguments(
    served: Served, build: Build, host: str, port: int, extra: Sequence[str]
) -> list[str]:
    """Return the arguments of vLLM's API server. Those in `extra` override the others.

    Raises ConfigError: `extra` has an option that could let others in without a key.
    """
    for argument in extra:
        _reject_own_option(argument)
    arguments = [
        *("--model", served.model, "--dtype", served.dtype),
        *("--load-format", "safetensors"),  # never pickles
        *("--max-model-len", str(served.max_model_len)),
        *("--served-model-name", BASE if served.adapter else served.name),
        *("--host", host, "--port", str(port)),
        *("--middleware", "openenv_pipe_key.OnlyClients"),
    ]
    if served.revision is not None:
        arguments += ["--revision", served.revision]
    if served.gpu_memory_share is not None and build == "cuda":
        arguments += ["--gpu-memory-utilization", str(served.gpu_memory_share)]
    if served.adapter is not None:
        arguments += ["--enable-lora", "--max-lora-rank", str(allowed_rank(served.lora_rank))]
        arguments += ["--lora-modules", f"{served.name}={served.adapter}"]
    if served.chat_template is not None:
        arguments += ["--chat-template", str(served.chat_template)]
        arguments += ["--chat-template-content-format", "string"]  # as programs are trained
    if served.call_format is not None:
        parser = TOOL_PARSERS.get(served.call_format, served.call_format)
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    if build == "cpu":
        longest = str(max(FEWEST_BATCHED_TOKENS, served.max_model_len))
        arguments += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", longest]
    return [*arguments, *extra]


@asynccontextmanager
async def running(
    served: Served,
    installed: Installed,
    arguments: Sequence[str],
    *,
    url: str,
    key: str,
    start_timeout_s: float,
    log: Path,
    notify: Notify,
    variables: Mapping[str, str] = MappingProxyType({}),
    variables_key: str | None = None,
) -> AsyncIterator[ManagedProcess]:
    """Run a server that has answered a health check; it is stopped at the end of the block.

    arguments: those of `serving_arguments`.
    url: where they make the server listen.
    key: what every request has to carry.
    variables: further environment variables of the server.
    variables_key: the key of the configuration that they are from.

    Raises EngineError: the server died at its start, or was not ready within `start_timeout_s`.
    """
    log_begin = log_size(log)
    own = {"PYTHONPATH": python_path(sees_images=False), KEY_VARIABLE: key}
    environment = process_environment(
        served.model, {**_variables(installed.build), **variables, **own}
    )
    server = server_process(installed.python, arguments, environment, log)
    try:
        async with VllmClient(url, api_key=key, request_timeout_s=ATTEMPT_LIMIT_S) as client:
            notify(f"engine: waiting for {url}, which can take minutes (log: {log})")
            ready = wait_until_healthy(url, timeout_s=start_timeout_s, check=client.check_health)
            await unless_dead(ready, server.exited())
        yield server
    except NotReadyError as error:
        cause = first_error(log, log_begin)
        note = names_left_out(environment, last_lines(log), variables_key)
        parts = [f"{error}: {cause}" if cause else str(error), note]
        raise EngineError("; ".join(filter(None, parts)), log) from error
    finally:
        await asyncio.shield(server.stopped(STOP_LIMIT_S))


def _reject_own_option(argument: str) -> None:
    """Raise ConfigError if vLLM's parser reads an argument as one of `OWN_OPTIONS`.

    The parser accepts `--host=X`, and every beginning of a name that no other option shares.
    """
    name = argument.partition("=")[0].replace("_", "-")
    for option, instead in OWN_OPTIONS.items():
        if len(name) > len("--") and option.startswith(name):
            raise ConfigError(f"{name} cannot be passed on to vLLM; set {instead}")


def _variables(build: Build) -> dict[str, str]:
    """Return the variables that the build needs besides those of this process."""
    if build != "cpu":
        return {}
    # Without this limit the server's cache takes nearly all memory, whether it is free or not.
    return {CACHE_VARIABLE: os.environ.get(CACHE_VARIABLE, CPU_CACHE_GB)}
