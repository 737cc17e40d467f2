"""Reject architectures that no forward pass of this package computes, without weights.

`check` and every load of a model ask here. `forward_check.py` then compares values, which also
finds what no configuration says.
"""

from collections.abc import Iterator
from typing import Any

from openenv_pipe.errors import ConfigError
from openenv_pipe.models.forward.logit_transform import measure_logit_transform

# The rotary angles of these depend on the position alone, and not on the length of a row.
STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
CHANGING_ROPE = ("dynamic", "longrope")  # beyond a length that the configuration names
MODEL = "of the model"
ADVICE = "choose another model, such as Qwen3 or Llama"


def reject_unsupported(model: Any) -> None:
    """Raise ConfigError if the model is of an unsupported architecture; its values do not matter.

    model: one without an adapter, also on torch's device `meta`.
    """
    config, name = model.config.get_text_config(), type(model).__name__
    if not all(getattr(module, "is_causal", True) for module in find_decoder(model).modules()):
        raise ConfigError(
            f"model.path: {name} has attention that is not causal, which is not supported; {ADVICE}"
        )
    for rope_type in [each.get("rope_type") or "default" for each in _rope_parameters(config)]:
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


def find_max_length(model: Any) -> tuple[int | None, str]:
    """Return how long rows may be, in tokens, and why; None if the configuration names no length.

    Beyond the original length, longrope and dynamic rope give all tokens of a batch other angles
    than before, so that sampler and learner, whose batches differ, would disagree.
    """
    config = model.config.get_text_config()
    length: int | None = getattr(config, "max_position_embeddings", None)
    for values in _rope_parameters(config):
        if values.get("rope_type") in CHANGING_ROPE:
            original = values.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            if original is not None and (length is None or original < length):
                rope_type = values["rope_type"]
                return original, f"up to which rope_type={rope_type} does not change its angles"
    return length, MODEL


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotary parameters, of which some models have several, by kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    is_nested = found and all(isinstance(each, dict) or each is None for each in found.values())
    yield from (each for each in found.values() if each) if is_nested else [found]
