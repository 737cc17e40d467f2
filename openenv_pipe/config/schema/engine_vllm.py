"""`engine` of type vllm: vLLM servers, started or attached to, sampled over HTTP."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from openenv_pipe.config.rules.engine import option_name
from openenv_pipe.config.schema.base import (
    HeaderValue,
    NumProcesses,
    NumRetries,
    Port,
    Positive,
    PositiveCount,
    PositiveShare,
    Seconds,
    SecondsOrZero,
    ServerUrl,
    Share,
    Variables,
)
from openenv_pipe.config.schema.engine_base import (
    EngineBlock,
    EngineCapabilities,
    PublishMode,
    TruncationConfig,
)
from openenv_pipe.config.schema.registered import RegisteredName
from openenv_pipe.registry import if_command

# The pipeline sets these arguments itself, because sampling or logprobs depend on them.
RESERVED_ARGUMENTS = {
    "--model": "model.path names the model",
    "--revision": "model.revision sets it",
    "--served-model-name": "requests name the base model by it",
    "--host": "the run chooses where a managed server listens",
    "--port": "engine.port sets it",
    "--api-key": "the run makes a key of its own for each server",
    "--dtype": "engine.dtype sets it",
    "--max-model-len": "engine.max_model_len sets it",
    "--max-num-seqs": "engine.max_requests sets it",
    "--gpu-memory-utilization": "engine.gpu_memory_share sets it",
    "--enable-sleep-mode": "engine.sleep sets it",
    "--logprobs-mode": "training needs the logprobs of the distribution that is sampled",
    "--generation-config": "the model's own top_p and top_k would apply unnoticed",
    "--override-generation-config": "its top_p and top_k would apply unnoticed",
    "--enable-lora": "engine.publish sets it",
    "--max-loras": "engine.publish sets it",
    "--max-lora-rank": "model.lora.rank sets it",
    "--weight-transfer-config": "engine.weight_transfer sets it",
    "--worker-extension-cls": "weights are published through the pipeline's own extension",
    "--speculative-config": "logprobs would not be those of the sampled distribution",
}


class SamplingConfig(TruncationConfig):
    """What else changes the distribution that vLLM samples, for evaluation only."""

    min_p: Share = Field(
        description="drop tokens below this fraction of the highest probability; 0: off"
    )
    repetition_penalty: Positive = Field(
        description="above 1, tokens of the prompt and the reply become less likely; 1: off"
    )
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = Field(
        description="above 0, tokens that the reply has become less likely; 0: off"
    )
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = Field(
        description="the same in proportion to how often the reply has them; 0: off"
    )


class VllmEngineConfig(EngineBlock):
    """vLLM servers that take and return token ids; every new policy is published to them.

    Values: conf/engine/vllm.yaml.
    """

    capabilities = EngineCapabilities(
        takes="token_ids", can_train=True, is_exact=False, publishes_in_flight=True
    )
    type: Literal["vllm"]
    launch: Annotated[str, RegisteredName("engine.launch")] = Field(
        description="managed: start a server in the Python environment"
        + if_command("engine", " that `openenv-pipe engine install vllm` made")
        + "; docker: start the official image; attach: use servers that run already"
    )
    image: str = Field(description="the image for launch=docker")
    url: ServerUrl | Annotated[list[ServerUrl], Field(min_length=1)] | None = Field(
        description="the server for launch=attach, or a list of servers that share the episodes"
    )
    api_key: HeaderValue | None = Field(description="bearer token for attached servers; null: none")
    num_servers: NumProcesses = Field(
        description="servers to start, with the same policy; the GPUs that the learner does not "
        "use, or the cores, are divided among them"
    )
    port: Port | None = Field(
        description="port of the first server; the others get the next ones; null: any free ports"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        description="the server's precision; auto: that of the trainer's matrix products"
    )
    max_model_len: PositiveCount = Field(
        description="tokens of the longest episode that the server accepts"
    )
    max_requests: PositiveCount = Field(
        description="episodes that each server samples at once; larger is faster and needs more "
        "memory; further requests wait"
    )
    gpu_memory_share: PositiveShare = Field(
        description="fraction of a GPU's memory for each server, weights included; larger allows "
        "more requests at once; a trainer on the same GPU needs the rest"
    )
    sleep: Literal["auto", "never", "level1", "level2"] = Field(
        description="whether the server frees that memory while the learner works; level1: its "
        "weights wait in the machine's memory; level2: its weights are dropped, for publish=merged "
        "or full; auto: one of these if server and learner would not fit on one GPU together"
    )
    cpu_cache_gb: PositiveCount = Field(
        description="memory for keys and values on a CPU, in gibibytes"
    )
    publish: Literal["auto", "adapter", "merged", "full"] = Field(
        description="what the server receives of a new policy; adapter: the LoRA adapter; merged: "
        "base and adapter merged into one; full: all weights; auto: full without an adapter, "
        "merged in float32 on a CPU, where vLLM is slow with adapters, else adapter"
    )
    weight_transfer: Annotated[str, RegisteredName("engine.weight_transfer")] = Field(
        description="how merged or full weights reach the server; files: through weights_dir; "
        "broadcast: from memory to memory, by vLLM's NCCL transfer to servers on other GPUs, by "
        "gloo between CPUs of one machine; ipc: by vLLM's CUDA IPC transfer, to a server on the "
        "learner's GPU"
    )
    weights_dir: str | None = Field(
        description="folder for published weights; null: in memory, such as /dev/shm"
    )
    sampling: SamplingConfig
    arguments: list[str] = Field(description="further command-line arguments of the server")
    variables: Variables = Field(
        description="further environment variables of the server; null: the value that this "
        "process has"
    )
    start_timeout_s: Seconds = Field(
        description="time limit of a start, loading and compiling included"
    )
    request_timeout_s: Seconds = Field(
        description="time limit of one completion, queueing included"
    )
    stop_timeout_s: SecondsOrZero = Field(description="time between SIGTERM and SIGKILL")
    max_restarts: NumRetries = Field(
        description="how often each server may be restarted before the run fails"
    )

    @property
    def urls(self) -> list[str]:
        """The URLs of the servers to attach to."""
        return [self.url] if isinstance(self.url, str) else list(self.url or ())

    @property
    def starts_servers(self) -> bool:
        return self.launch != "attach"

    @property
    def served_length(self) -> int:
        return self.max_model_len

    @property
    def fixed_ports(self) -> Sequence[int]:
        if self.port is None or not self.starts_servers:
            return ()
        return range(self.port, self.port + self.num_servers)

    @property
    def distortions(self) -> dict[str, float]:
        return self.sampling.distortions

    def publish_mode(
        self, lora_rank: int, *, dtype: str, precision: str, on_gpu: bool
    ) -> PublishMode:
        if self.publish != "auto":
            return self.publish
        if not lora_rank:
            return "full"
        # vLLM's CPU build is many times as slow with an adapter. Merged into float32 it is exact.
        is_exact = dtype == self.served_precision(precision) == "float32"
        return "merged" if is_exact and self.starts_servers and not on_gpu else "adapter"

    def served_precision(self, precision: str) -> str:
        """Return the servers' precision. precision: that of the trainer's matrix products."""
        return precision if self.dtype == "auto" else self.dtype

    def memory_keys(self, *, on_gpu: bool, servers_awake: bool) -> list[str]:
        if not servers_awake:
            return []
        keys = ["engine.gpu_memory_share"] if on_gpu else []
        if not on_gpu and self.cpu_cache_gb > 1:
            keys.append("engine.cpu_cache_gb")
        return [*keys, "engine.num_servers"] if self.num_servers > 1 else keys

    @model_validator(mode="after")
    def _servers_and_arguments_fit(self) -> "VllmEngineConfig":
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("url names a server twice; raise max_requests to sample more at once")
        for argument in self.arguments:
            if why := RESERVED_ARGUMENTS.get(option_name(argument)):
                raise ValueError(f"arguments must not contain {argument!r}: {why}")
        return self
