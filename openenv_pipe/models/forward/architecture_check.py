"""Reject architectures that no forward pass of this package computes, without weights.

`check` and every load of a model ask here. `forward_check.py` then compares values, which also
finds what no configuration says.
"""

from typing import Any

from openenv_pipe.errors import ConfigError
from openenv_pipe.models.forward.logit_transform import measure_logit_transform
from openenv_pipe.models.forward.rope_table import (
    CHANGING_ROPE,
    DYNAMIC,
    STATIC_ROPE,
    rope_parameters,
)

ADVICE = "choose another model, such as Qwen3 or Llama"


def reject_unsupported(model: Any) -> None:
    """Raise ConfigError if the model is of an unsupported architecture; its values do not matter.

    model: one without an adapter, also on torch's device `meta`.
    """
    config, name = model.config.get_text_config(), type(model).__name__
    # Attention without a layer's index has no cache: it is over layers, not over tokens.
    attention = [each for each in find_decoder(model).modules() if hasattr(each, "layer_idx")]
    if not all(getattr(module, "is_causal", True) for module in attention):
        raise ConfigError(
            f"model.path: {name} has attention that is not causal, which is not supported; {ADVICE}"
        )
    for rope_type in [each.get("rope_type") or "default" for each in rope_parameters(config)]:
        if rope_type not in (*STATIC_ROPE, *CHANGING_ROPE):
            raise ConfigError(
                f"model.path: rope_type={rope_type} of {name} is not supported; expected one of "
                f"{', '.join((*STATIC_ROPE, *CHANGING_ROPE))}"
            )
    measure_logit_transform(model, find_decoder(model))


def find_decoder(model: Any) -> Any:
    """Return the part of a causal language model that has its layers.

    transformers 5.24 finds neither that of Llama 4, whose base model has another name, nor that of
    ModernBERT, whose head is called decoder.
    """
    decoder = model.get_decoder()
    if decoder is model or decoder is model.get_output_embeddings():
        decoder = model.model
    return decoder


def find_max_length(model: Any) -> int | None:
    """Return how long rows may be, in tokens; None if the configuration names no length."""
    config = model.config.get_text_config()
    length: int | None = getattr(config, "max_position_embeddings", None)
    for values in rope_parameters(config):
        if length is not None and values.get("rope_type") == DYNAMIC:
            length = max(length, int(length * values.get("factor", 1.0)))
    return length
