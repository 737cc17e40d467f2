"""Reject architectures that no forward pass of this package computes, and fix rotary angles.

`check` and every load of a model do this; weights do not matter. `forward_check.py` then compares
values, which also finds what no configuration says.

transformers computes the angles of longrope and dynamic rope by the longest row of a batch, so that
a token's logprob would depend on the other rows. Here the longest episode of the run decides,
as vLLM's `max_model_len` does, and sampler, learner and reference have the same table.
"""

from collections.abc import Iterator
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from openenv_pipe.errors import ConfigError
from openenv_pipe.models.forward.logit_transform import ADVICE, measure_logit_transform

# The rotary angles of these depend on the position alone, and not on the length of a row.
STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
DYNAMIC, LONGROPE = "dynamic", "longrope"
CHANGING_ROPE = (DYNAMIC, LONGROPE)  # beyond a length that the configuration names


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


def fix_rope_table(model: Any, max_tokens: int | None) -> None:
    """Give the model the angles of rows of `max_tokens`, whatever rows it computes.

    max_tokens: None stands for rows that are no longer than the original length.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):  # by kind of layer
            for layer in [layer for layer, kind in kinds.items() if kind in CHANGING_ROPE]:
                _fix(module, kinds[layer], max_tokens, layer)
                kinds[layer] = "default"
        elif kinds in CHANGING_ROPE:
            _fix(module, kinds, max_tokens, None)
            module.rope_type = "default"


def _fix(module: Any, kind: str, max_tokens: int | None, layer: str | None) -> None:
    prefix = "" if layer is None else f"{layer}_"
    table = getattr(module, f"{prefix}inv_freq")
    values, scaling = ROPE_INIT_FUNCTIONS[kind](
        module.config, table.device, seq_len=max_tokens, layer_type=layer
    )
    table.copy_(values)
    setattr(module, f"{prefix}attention_scaling", scaling)


def original_lengths(model: Any) -> dict[str, int]:
    """Return the length up to which each changing rope type of the model has its first table."""
    config = model.config.get_text_config()
    found = {}
    for values in rope_parameters(config):
        if values.get("rope_type") == DYNAMIC:
            found[DYNAMIC] = config.max_position_embeddings
        elif values.get("rope_type") == LONGROPE:
            original = values.get("original_max_position_embeddings")
            found[LONGROPE] = original or config.original_max_position_embeddings
    return found


def rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotary parameters, of which some models have several, by kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    is_nested = found and all(isinstance(each, dict) or each is None for each in found.values())
    yield from (each for each in found.values() if each) if is_nested else [found]
