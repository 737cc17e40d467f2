"""The rows of a run's report that say which model was trained, and how it was computed."""

from collections.abc import Mapping
from typing import Any

from openenv_pipe.config.schema import HubModelConfig, ModelConfig, RunConfig
from openenv_pipe.system.untrusted_text import for_markdown


def model_rows(config: RunConfig, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows by their titles. facts: of the run's record."""
    return {"model": _model(config.model, facts), **_forward(config, facts)}


def _model(model: ModelConfig, facts: Mapping[str, Any]) -> str:
    if isinstance(model, HubModelConfig):
        name = for_markdown(f"{model.path}{f' at {model.revision}' if model.revision else ''}")
    else:
        name = f"tiny Qwen3 with random weights, {model.num_layers} layers of {model.hidden_size}"
    tuning = f"LoRA of rank {model.lora.rank}" if model.lora.rank else "full training"
    if model.quantization != "none":
        tuning += f" above weights in {model.quantization}"
    size = facts.get("num_parameters")
    return f"{name}{f', {size:,} parameters' if isinstance(size, int) else ''}, {tuning}"


def _forward(config: RunConfig, facts: Mapping[str, Any]) -> dict[str, str]:
    """Say how the model was trained and sampled, and why not in a faster way; nothing for a run
    that found out neither."""
    found = facts.get("forward")
    if not isinstance(found, dict):
        return {}
    text = f"trained in {found.get('learner')} rows"
    if config.engine.type == "local":
        text += f", {found.get('sampler')} sampling"
    left_out = found.get("left_out")
    reasons = left_out.items() if isinstance(left_out, dict) else ()
    why = "; ".join(f"not {name}: {reason}" for name, reason in reasons)
    return {"forward passes": for_markdown(f"{text} ({why})" if why else text)}
