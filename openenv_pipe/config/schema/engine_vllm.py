"""`engine` of type vllm: vLLM servers, started or attached to, sampled over HTTP."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    Field,
    model_validator,
)

from openenv_pipe.config.schema.base import (
    Block,
    Count,
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
from openenv_pipe.config.schema.engine_base import EngineBlock, EngineCapabilities

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")

SEVERAL_GPUS = ("--tensor-parallel", "-tp", "--pipeline-parallel", "-pp")
SEVERAL_ENGINES = ("--data-parallel", "-dp")

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


class SamplingConfig(Block):
    """Changes of the sampled distribution, for evaluation only; training needs all of them off."""

    top_p: PositiveShare = Field(
        description="sample from the most likely tokens up to this total probability; 1: off"
    )
    top_k: Count = Field(description="sample from this many of the most likely tokens; 0: off")
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

    @property
    def distortions(self) -> list[str]:
        """The settings that are not off: with them, logprobs are not the model's own."""
        off = {"top_p": 1.0, "repetition_penalty": 1.0}
        values = self.model_dump()
        return [f"{key}={value}" for key, value in values.items() if value != off.get(key, 0)]


class VllmEngineConfig(EngineBlock):
    """vLLM servers that take and return token ids; every new policy is published to them.

    Values: conf/engine/vllm.yaml.
    """

    capabilities = EngineCapabilities(
        takes="token_ids",
        can_train=True,
        is_exact=False,
        publishes_in_flight=True,
    )
    type: Literal["vllm"]
    launch: Literal["managed", "docker", "attach"] = Field(
        description="managed: start a server in the Python environment that `openenv-pipe engine "
        "install vllm` made; docker: start the official image; attach: use servers that run already"
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
        description="port of the first server, the others follow; null: any free ports"
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
        "base and adapter merged into one; full: all weights; auto: adapter if model.lora.rank > "
        "0, else full"
    )
    weight_transfer: Literal["files", "broadcast", "ipc"] = Field(
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

    @model_validator(mode="after")
    def _fits_together(self) -> "VllmEngineConfig":
        if self.launch == "attach" and self.url is None:
            raise ValueError("launch=attach needs engine.url, such as http://127.0.0.1:8000")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("url names a server twice; raise max_requests to sample more at once")
        if self.launch == "attach" and self.num_servers > 1:
            raise ValueError(
                "num_servers counts servers to start; with launch=attach give url a list instead"
            )
        if self.weight_transfer != "files":
            self._refuse_distance()
        for argument in self.arguments:
            if why := RESERVED_ARGUMENTS.get(_option(argument)):
                raise ValueError(f"arguments must not contain {argument!r}: {why}")
        return self

    def _refuse_distance(self) -> None:
        """Refuse servers that a transfer from memory to memory does not reach."""
        chosen = f"weight_transfer={self.weight_transfer}"
        if self.launch == "docker":
            raise ValueError(
                f"{chosen} does not work with a container, which shares too little with the "
                "learner; set launch=managed, or weight_transfer=files"
            )
        if self.weight_transfer == "broadcast" and self.sleep in ("level1", "level2"):
            raise ValueError(
                f"{chosen} and sleep={self.sleep}: a server sleeps for a learner on its GPU, and "
                "weights are sent to other GPUs; set weight_transfer=ipc or files"
            )
        if any(_option(each).startswith(SEVERAL_ENGINES) for each in self.arguments):
            raise ValueError(
                f"{chosen} reaches only one engine of a server, and arguments start several; set "
                "num_servers instead, or weight_transfer=files"
            )
        if self.weight_transfer == "ipc":
            self._refuse_other_gpus()

    def _refuse_other_gpus(self) -> None:
        """Refuse servers that use more than the learner's GPU, or that of another machine."""
        for argument in self.arguments:
            if _option(argument).startswith(SEVERAL_GPUS):
                raise ValueError(
                    f"weight_transfer=ipc reaches one GPU, and {argument!r} divides a server over "
                    "several; set weight_transfer=broadcast or files"
                )
        for url in self.urls:
            if urlsplit(url).hostname not in LOCAL_HOSTS:
                raise ValueError(
                    f"weight_transfer=ipc needs servers on this machine, and {url} may be on "
                    f"another; expected one of {', '.join(LOCAL_HOSTS)}, or another transfer"
                )


def _option(argument: str) -> str:
    """Return the name of an option without its value, as vLLM's parser reads it."""
    return argument.partition("=")[0].replace("_", "-")
