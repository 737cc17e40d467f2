"""One table of rotary angles for a run, of models that have several.

transformers computes longrope and dynamic rope by the longest row of a batch, so that a token's
logprob would depend on the rows beside it. Here the longest episode of the run decides, as vLLM's
`max_model_len` does, and sampler, learner and reference have the same table.
"""

from collections.abc import Iterator
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# The rotary angles of these depend on the position alone, and not on the length of a row.
STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
DYNAMIC, LONGROPE = "dynamic", "longrope"
CHANGING_ROPE = (DYNAMIC, LONGROPE)  # beyond a length that the configuration names


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
    """Return, for each changing rope type of the model, the length up to which rows have its first
    table of angles."""
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
