"""`model`: what is trained."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from openenv_pipe.config.schema.base import Block


class LoraConfig(Block):
    """Low-rank adapters by peft. rank 0: full training."""

    rank: NonNegativeInt
    alpha: PositiveFloat
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)]
    target_modules: str | list[str]


class _Model(Block):
    lora: LoraConfig
    quantization: Literal["none", "nf4"] = Field(
        description="nf4: layers under the adapter are kept in four bits (QLoRA)"
    )
    dtype: Literal["float32", "bfloat16"] = Field(description="of the weights")
    autocast: Literal["float32", "bfloat16"] = Field(description="of matrix products")
    activation_checkpointing: bool = Field(
        description="layers are computed again in the backward pass: slower, less memory"
    )
    chat_template: str | None = Field(description="Jinja chat template; null: the tokenizer's own")

    @model_validator(mode="after")
    def _only_what_is_frozen_is_quantized(self) -> "_Model":
        if self.quantization != "none" and not self.lora.rank:
            raise ValueError(
                f"quantization={self.quantization} with lora.rank=0: weights in four bits cannot "
                "be trained; set lora.rank above 0, 16 for example, or quantization=none"
            )
        return self


class TinyModelConfig(_Model):
    """A Qwen3 with random weights and a byte-level tokenizer, built on the spot from the seed."""

    type: Literal["tiny"]
    seed: NonNegativeInt = Field(description="of the weights")
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_size: PositiveInt
    max_length: PositiveInt
    rope_theta: PositiveFloat
    init_std: PositiveFloat

    @model_validator(mode="after")
    def _heads_fit(self) -> "TinyModelConfig":
        if self.num_heads % self.num_kv_heads or self.head_size % 2:
            raise ValueError(
                f"num_heads={self.num_heads} has to be a multiple of num_kv_heads="
                f"{self.num_kv_heads}, and head_size={self.head_size} even"
            )
        return self


class HubModelConfig(_Model):
    """Any causal LM of transformers: a folder, or an id on the model hub. Safetensors only."""

    type: Literal["hub"]
    path: str
    revision: str | None


ModelConfig = Annotated[TinyModelConfig | HubModelConfig, Field(discriminator="type")]
