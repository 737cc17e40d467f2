"""`model`: the model that is trained."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from openenv_pipe.config.schema.base import (
    Block,
    LayerSize,
    Positive,
    PositiveCount,
    Seed,
    ShareBelowOne,
)
from openenv_pipe.registry import if_command


def _time(text: str) -> str:
    try:
        is_time = datetime.fromisoformat(text).tzinfo is None
    except ValueError:
        is_time = False
    if not is_time:
        raise ValueError(
            f"{text!r:.40} is not a time; expected one without a time zone, such as "
            "2026-04-30T12:00:00"
        )
    return text


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A base model that vLLM servers load themselves."""

    path: str  # a folder, or an id on a model hub
    revision: str | None


class LoraConfig(Block):
    """Low-rank adapters (LoRA), made by peft."""

    rank: Annotated[int, Field(ge=0, le=65536)] = Field(
        description="rank of the adapters; larger learns more and needs more memory; 0: no "
        "adapters, all weights are trained"
    )
    alpha: Positive = Field(description="the adapter's output is scaled by alpha / rank")
    dropout: ShareBelowOne = Field(
        description="dropout on the adapters' inputs; above 0 the policy that learns is not quite "
        "the one that sampled"
    )
    target_modules: str | list[str] = Field(
        description="names of the layers that get adapters, or all-linear: every linear layer but "
        "the head, routers, `out_proj` of Mamba and layers that share one matrix"
        + if_command("check", "; `openenv-pipe check` counts them")
    )


class _Model(Block):
    lora: LoraConfig
    quantization: Literal["none", "nf4"] = Field(
        description="nf4: the frozen layers are stored in four bits (QLoRA), for less memory"
    )
    dtype: Literal["float32", "bfloat16"] = Field(description="precision of the stored weights")
    autocast: Literal["float32", "bfloat16"] = Field(description="precision of matrix products")
    activation_checkpointing: bool = Field(
        description="recompute each layer in the backward pass: slower, with less memory"
    )
    chat_template: str | None = Field(description="Jinja chat template; null: the tokenizer's own")
    chat_template_kwargs: dict[str, Any] = Field(
        description="variables of the chat template for all prompts, such as enable_thinking or "
        "reasoning_effort, by name; they are written into exported models, too"
    )
    template_time: Annotated[str, AfterValidator(_time)] | None = Field(
        description="the time that a chat template reads from the clock, the same in all prompts "
        "of a run; null: when the run was created, in UTC (run.json), or for a fork or a "
        "reproduction that of the run it comes from"
    )
    history: Literal["auto", "append", "rerender"] = Field(
        description="append: prompts only grow, by the template's text between two replies; "
        "rerender: the template renders all messages for each prompt, and what it changes begins "
        "a sample of its own; auto: append, or rerender if the template rewrites earlier turns"
    )


class TinyModelConfig(_Model):
    """A Qwen3 with random weights and a byte-level tokenizer (conf/model/tiny.yaml)."""

    type: Literal["tiny"]
    seed: Seed = Field(description="seed of the initial weights")
    hidden_size: LayerSize = Field(description="width of the residual stream")
    intermediate_size: LayerSize = Field(description="width of the MLP's hidden layer")
    num_layers: Annotated[int, Field(ge=1, le=1000)]
    num_heads: LayerSize = Field(description="attention heads of each layer")
    num_kv_heads: LayerSize = Field(description="key and value heads; must divide num_heads")
    head_size: LayerSize = Field(description="width of each attention head; even")
    max_length: PositiveCount = Field(description="positions, the most tokens of an episode")
    rope_theta: Positive = Field(
        description="base of the rotary embedding; smaller tells near positions apart better"
    )
    init_std: Positive = Field(description="standard deviation of the initial weights")

    @property
    def label(self) -> str:
        """The model's name in messages and reports."""
        return "tiny"

    @property
    def source(self) -> None:
        """Where vLLM servers find the base model: nowhere, so a run writes it for them."""

    @field_validator("head_size")
    @classmethod
    def _is_even(cls, head_size: int) -> int:
        if head_size % 2:
            raise ValueError(f"{head_size} is odd; the rotary embedding needs an even width")
        return head_size


class HubModelConfig(_Model):
    """Any causal language model of transformers, in safetensors or GGUF (conf/model/hub.yaml).

    With `engine=local` or `vllm` also vision-language models like Qwen2-VL and Qwen2.5-VL.
    """

    type: Literal["hub"]
    path: str = Field(description="a folder, a GGUF file, or an id on the model hub")
    revision: str | None = Field(description="branch, tag or commit on the hub; null: the newest")

    @property
    def label(self) -> str:
        return self.path

    @property
    def source(self) -> ModelSource | None:
        """Where vLLM servers find the base model; None: a run writes it for them."""
        if self.quantization != "none":  # the adapter is trained on top of the quantized weights
            return None
        return ModelSource(path=str(Path(self.path).expanduser()), revision=self.revision)


ModelConfig = Annotated[TinyModelConfig | HubModelConfig, Field(discriminator="type")]
