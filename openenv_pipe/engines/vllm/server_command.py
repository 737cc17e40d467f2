"""The command line and the environment variables of a server: one text for all ways to start it.

The reason for each setting stands beside it; most were found by losing a server without it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.client import BASE
from openenv_pipe.engines.vllm.install import Build

MOST_ADAPTERS_KEPT = 3  # published versions that requests may still ask for
FEWEST_BATCHED_TOKENS = 8192
ALWAYS = {
    "PYTHONUNBUFFERED": "1",  # or a killed server takes its last log lines with it
    "VLLM_NO_USAGE_STATS": "1",
}
OF_OUR_PYTHON = ("PYTHONPATH", "VIRTUAL_ENV")  # the server has another one


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpec:
    """What is to be served."""

    model: str  # a folder, or an id on a hub
    revision: str | None
    build: Build
    dtype: str
    lora_rank: int  # 0: no adapters are published
    sleeps: bool = False  # it may be told to give its memory back
    number: int = 0  # among the servers of the engine
    placement: Mapping[str, str] = field(default_factory=dict)  # variables: its GPUs or cores


def server_arguments(spec: ServerSpec, config: VllmEngineConfig, host: str, port: int) -> list[str]:
    """What follows `python -m vllm.entrypoints.openai.api_server`."""
    arguments = [
        *("--model", spec.model, "--served-model-name", BASE),
        *("--host", host, "--port", str(port)),
        *("--dtype", spec.dtype, "--max-model-len", str(config.max_model_len)),
        *("--max-num-seqs", str(config.max_requests)),
        *("--generation-config", "vllm"),  # not the model's own top_p and top_k
        *("--logprobs-mode", "processed_logprobs"),  # of what is sampled: with the temperature
        "--enable-scale-out",  # brings /inference/v1/generate: ids in, ids out
        "--enable-prefix-caching",
        "--disable-uvicorn-access-log",  # a line for every request
        *("--worker-extension-cls", "openenv_pipe_worker.PolicyWorker"),
    ]
    if spec.revision is not None:
        arguments += ["--revision", spec.revision]
    if spec.lora_rank:
        # Two versions at work, or requests of a new one wait for the end of the old one's.
        arguments += ["--enable-lora", "--max-lora-rank", str(allowed_rank(spec.lora_rank))]
        arguments += ["--max-loras", "2", "--max-cpu-loras", str(2 * MOST_ADAPTERS_KEPT)]
    if spec.sleeps:
        arguments.append("--enable-sleep-mode")
    if spec.build == "cpu":
        # A seed and a prefill in chunks kill the engine there.
        longest = max(FEWEST_BATCHED_TOKENS, config.max_model_len)
        arguments += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(longest)]
    else:
        arguments += ["--gpu-memory-utilization", str(config.gpu_memory_share)]
    return arguments + list(config.arguments)


def server_variables(spec: ServerSpec, config: VllmEngineConfig, inside: str) -> Mapping[str, str]:
    """Beside the variables of the place where it runs. `inside` is our folder for its process."""
    variables = {
        **ALWAYS,
        "PYTHONPATH": inside,
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, collective_rpc
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # 5 s drop requests when the server stalls
    }
    if spec.build == "cpu":
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(config.cpu_cache_gb)
    return {**variables, **spec.placement, **config.variables}


def process_environment(model: str, variables: Mapping[str, str]) -> dict[str, str]:
    """All variables of a server that is a process here: ours, under those of its own."""
    ours = {name: text for name, text in os.environ.items() if name not in OF_OUR_PYTHON}
    offline = {"HF_HUB_OFFLINE": "1"} if Path(model).is_dir() else {}
    return {**ours, **ALWAYS, **offline, **variables}


def allowed_rank(rank: int) -> int:
    """vLLM knows these sizes only."""
    return next(size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank)
