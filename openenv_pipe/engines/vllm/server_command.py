"""The command line and the environment variables of a vLLM server, for every kind of launch.

The comment beside a setting gives the reason for it.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.connection import BASE
from openenv_pipe.engines.vllm.installed import INSIDE, OF_OUR_PYTHON, Build
from openenv_pipe.system.child_environment import child_environment, given_variables
from openenv_pipe.system.secrets import SERVER_SIDE

TransferBackend = Literal["nccl", "ipc"]  # of vLLM's own weight transfer
MAX_ADAPTERS = 3  # versions that stay loaded for requests that began with them
FEWEST_BATCHED_TOKENS = 8192
ALWAYS = {
    "PYTHONUNBUFFERED": "1",  # without it a killed server's last lines never reach its log
    "VLLM_NO_USAGE_STATS": "1",
}
KEY_VARIABLE = "VLLM_API_KEY"  # in which the server and its middleware find the key
HOSTS_VARIABLE = "OPENENV_PIPE_HOSTS"  # allowed names of the server; see openenv_pipe_key.py
VARIABLES = "engine.variables"
HUB_CACHE = "/root/.cache/huggingface"  # in a container
MOUNTS = {INSIDE: "/openenv-pipe", SERVER_SIDE: "/openenv-pipe-key"}  # our folders in a container
INSIDE_CONTAINER = ":".join(MOUNTS.values())  # the same, as PYTHONPATH names them
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # of gated models


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpec:
    """What one server serves, and which part of the machine it uses."""

    model: str  # a folder, or an id on a model hub
    revision: str | None
    build: Build
    dtype: str
    lora_rank: int  # 0: no adapters are published
    sees_images: bool = False  # a vision-language model
    sleeps: bool = False  # it can be put to sleep, see sleep_mode.py
    transfer_backend: TransferBackend | None = None  # None: weights come in another way
    number: int = 0  # index among the engine's servers
    placement: Mapping[str, str] = field(default_factory=dict)  # variables: its GPUs or cores


def server_arguments(spec: ServerSpec, config: VllmEngineConfig, host: str, port: int) -> list[str]:
    """Return the arguments of `python -m vllm.entrypoints.openai.api_server`."""
    arguments = [
        *("--model", spec.model, "--served-model-name", BASE),
        *("--host", host, "--port", str(port)),
        *("--load-format", "safetensors"),  # never pickles
        *("--dtype", spec.dtype, "--max-model-len", str(config.max_model_len)),
        *("--max-num-seqs", str(config.max_requests)),
        *("--generation-config", "vllm"),  # not the model's own top_p and top_k
        *("--logprobs-mode", "processed_logprobs"),  # after temperature, as tokens are drawn
        "--enable-scale-out",  # adds /inference/v1/generate, which takes and returns token ids
        "--enable-prefix-caching",
        "--disable-uvicorn-access-log",  # it writes a line for every request
        *("--worker-extension-cls", "openenv_pipe_worker.PolicyWorker"),
        *("--middleware", "openenv_pipe_key.OnlyTheRun"),
    ]
    if spec.revision is not None:
        arguments += ["--revision", spec.revision]
    if spec.lora_rank:
        # With room for one version, requests of a new one would wait for all requests of the old.
        arguments += ["--enable-lora", "--max-lora-rank", str(allowed_rank(spec.lora_rank))]
        arguments += ["--max-loras", "2", "--max-cpu-loras", str(2 * MAX_ADAPTERS)]
    if spec.sees_images:
        # Requests bring their images as patches with normalized values, and bring them each time.
        arguments += ["--no-mm-device-do-normalize", "--mm-processor-cache-gb", "0"]
        arguments += ["--limit-mm-per-prompt", '{"video": 0}']
    if spec.sleeps:
        arguments.append("--enable-sleep-mode")
    if spec.transfer_backend is not None:
        arguments += ["--weight-transfer-config", json.dumps({"backend": spec.transfer_backend})]
    if spec.build == "cpu":
        # On a CPU, a seed together with chunked prefill crashes vLLM's engine.
        longest = max(FEWEST_BATCHED_TOKENS, config.max_model_len)
        arguments += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(longest)]
        if spec.sees_images:
            arguments.append("--skip-mm-profiling")  # of the largest images: it takes minutes
    else:
        arguments += ["--gpu-memory-utilization", str(config.gpu_memory_share)]
    return arguments + list(config.arguments)


def server_variables(spec: ServerSpec, config: VllmEngineConfig, inside: str) -> Mapping[str, str]:
    """Return the variables to set for the server.

    inside: the folder `inside/`, and others for PYTHONPATH, as the server's process sees them.
    """
    variables = {
        **ALWAYS,
        "PYTHONPATH": inside,
        "VLLM_SERVER_DEV_MODE": "1",  # enables pause, resume, collective_rpc and weight transfer
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # the default, 5 s, loses requests when it stalls
    }
    if spec.build == "cpu":
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(config.cpu_cache_gb)
    given = given_variables(config.variables, VARIABLES)
    return {**variables, **spec.placement, **given}


def process_environment(model: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a server on this machine: those of a process, and `variables`."""
    on_disk = Path(model).is_dir()
    ours = child_environment(*(() if on_disk else HUB_TOKENS), without=OF_OUR_PYTHON)
    offline = {"HF_HUB_OFFLINE": "1"} if on_disk else {}
    return {**ours, **ALWAYS, **offline, **variables}


def allowed_rank(rank: int) -> int:
    """Return the smallest maximum rank that vLLM supports and that is at least `rank`."""
    return next(size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank)


def hub_cache() -> Path:
    """Return the folder of downloaded models, which containers share with this machine."""
    return Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
