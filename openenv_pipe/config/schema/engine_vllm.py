"""`engine` of type vllm: a server that is started, or attached to, and sampled over HTTP."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from openenv_pipe.config.schema.base import Block, Port, ServerUrl, Text
from openenv_pipe.config.schema.engine_base import EngineBlock, EngineCapabilities

NEAR = ("127.0.0.1", "localhost", "::1")  # addresses of this machine

# What we set ourselves, because what is sampled or its logprobs depend on it.
OURS = {
    "--model": "model.path names the model",
    "--revision": "model.revision names it",
    "--served-model-name": "requests name the base model by it",
    "--host": "a managed server listens on the loopback interface",
    "--port": "engine.port sets it",
    "--dtype": "engine.dtype sets it",
    "--max-model-len": "engine.max_model_len sets it",
    "--max-num-seqs": "engine.max_requests sets it",
    "--gpu-memory-utilization": "engine.gpu_memory_share sets it",
    "--enable-sleep-mode": "engine.sleep decides",
    "--logprobs-mode": "training needs the logprobs of the distribution that is sampled",
    "--generation-config": "a model's own top_p and top_k would apply in silence",
    "--override-generation-config": "its top_p and top_k would apply in silence",
    "--enable-lora": "engine.publish decides",
    "--max-loras": "engine.publish decides",
    "--max-lora-rank": "model.lora.rank decides",
    "--worker-extension-cls": "weights are published through ours",
    "--speculative-config": "logprobs would be those of another way to sample",
}


class SamplingConfig(Block):
    """What cuts or bends the distribution. For evaluation: see `bends`."""

    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(description="1: off")
    top_k: NonNegativeInt = Field(description="0: off")
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = Field(description="0: off")
    repetition_penalty: PositiveFloat = Field(description="1: off")
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = Field(description="0: off")
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = Field(description="0: off")

    @property
    def bends(self) -> list[str]:
        """Settings under which logprobs are not those of the model at a temperature."""
        off = {"top_p": 1.0, "repetition_penalty": 1.0}
        values = self.model_dump()
        return [f"{key}={value}" for key, value in values.items() if value != off.get(key, 0)]


class VllmEngineConfig(EngineBlock):
    """A vLLM server, token ids in and out, with every new policy published to it."""

    capabilities = EngineCapabilities(
        takes="token_ids", can_train=True, is_exact=False, publishes_in_flight=True
    )
    type: Literal["vllm"]
    launch: Literal["managed", "docker", "attach"] = Field(
        description="managed: in an environment of its own; docker: the official image; "
        "attach: one that runs already"
    )
    image: str = Field(description="for launch=docker")
    url: ServerUrl | Annotated[list[ServerUrl], Field(min_length=1)] | None = Field(
        description="for launch=attach; a list of several servers, between which episodes are split"
    )
    api_key: str | None = Field(description="that attached servers ask for")
    num_servers: PositiveInt = Field(
        description="to start, with the same policy; each gets its share of the GPUs that the "
        "learner leaves alone, or of the cores"
    )
    port: Port | None = Field(description="of the first server; null: any free ones")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        description="of the server's weights; auto: that of the trainer's matrix products"
    )
    max_model_len: PositiveInt = Field(description="tokens of an episode")
    max_requests: PositiveInt = Field(description="sampled at once, by a server; more wait")
    gpu_memory_share: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        description="of the GPU's memory, for each server, weights included; a trainer on the same "
        "GPU needs its own"
    )
    sleep: Literal["auto", "never", "level1", "level2"] = Field(
        description="give that memory to the learner while it works, and take it back for the next "
        "policy; level1: weights wait in the machine's memory; level2: they are dropped, for "
        "publish=merged or full; auto: one of these where both would not fit on one GPU"
    )
    cpu_cache_gb: PositiveInt = Field(description="keys and values, on a CPU; gibibytes")
    publish: Literal["auto", "adapter", "merged", "full"] = Field(
        description="adapter: LoRA by name; merged: base and adapter in one; full: all weights; "
        "auto: adapter where model.lora.rank > 0, else full"
    )
    weight_transfer: Literal["files", "broadcast"] = Field(
        description="how merged or full weights get to the server; files: it reads them in "
        "weights_dir; broadcast: from memory to memory on one machine, by NCCL to servers on GPUs "
        "of their own, by gloo between CPUs"
    )
    weights_dir: str | None = Field(
        description="where the server reads new weights; null: in memory, as /dev/shm"
    )
    sampling: SamplingConfig
    arguments: list[str] = Field(description="further ones of the server")
    variables: dict[str, Text] = Field(description="of the server's environment")
    start_timeout_s: PositiveFloat
    request_timeout_s: PositiveFloat = Field(description="of one completion, waiting included")
    stop_timeout_s: NonNegativeFloat
    max_restarts: NonNegativeInt = Field(description="of each server")

    @property
    def urls(self) -> list[str]:
        """Of the servers to attach to."""
        return [self.url] if isinstance(self.url, str) else list(self.url or ())

    @model_validator(mode="after")
    def _fits_together(self) -> "VllmEngineConfig":
        if self.launch == "attach" and self.url is None:
            raise ValueError("launch=attach needs engine.url, as in http://127.0.0.1:8000")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("url names a server twice; what it may sample at once is max_requests")
        if self.launch == "attach" and self.num_servers > 1:
            raise ValueError("num_servers is for servers to start; url may be a list of several")
        if self.weight_transfer == "broadcast":
            self._refuse_far_servers()
            self._refuse_sleep_and_ranks()
        for argument in self.arguments:
            if why := OURS.get(argument.split("=")[0]):
                raise ValueError(f"arguments may not hold {argument!r}: {why}")
        return self

    def _refuse_sleep_and_ranks(self) -> None:
        """What the group of learner and workers does not know."""
        if self.sleep in ("level1", "level2"):
            raise ValueError(
                f"weight_transfer=broadcast and sleep={self.sleep}: a server sleeps for a learner "
                "on its GPU, and weights are sent to other GPUs; set weight_transfer=files"
            )
        if any(argument.startswith("--data-parallel") for argument in self.arguments):
            raise ValueError(
                "weight_transfer=broadcast reaches one of a server's engines, and arguments start "
                "several; set num_servers instead, or weight_transfer=files"
            )

    def _refuse_far_servers(self) -> None:
        """Learner and workers meet in a file, and talk over loopback."""
        if self.launch == "docker":
            raise ValueError(
                "weight_transfer=broadcast: a container shares too little with the learner; set "
                "launch=managed, or weight_transfer=files"
            )
        for url in self.urls:
            if urlsplit(url).hostname not in NEAR:
                raise ValueError(
                    f"weight_transfer=broadcast is for servers on this machine, and {url} may be "
                    f"on another; expected one of {', '.join(NEAR)}, or weight_transfer=files"
                )
