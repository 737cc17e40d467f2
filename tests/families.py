"""Tiny folders of model families, as a hub's repository has them.

Weights are drawn wide, so that a wrong mask, position or name changes logprobs by far more than
rounding does: with transformers' own 0.02 a model of this size answers almost uniformly.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.models.load import load_policy
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.tiny import build_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def make_family(folder: Path, name: str, **options: Any) -> Path:
    """Write a folder of the family whose config is transformers' class `name`."""
    tokenizer = build_tokenizer()
    sizes = SIZES | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config = getattr(transformers, name)(**sizes | options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for values in model.parameters():
        if values.ndim == 1:
            values.data += 0.1 * torch.randn(values.shape)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def family_run(folder: Path, *overrides: str) -> RunConfig:
    """Return the configuration of a run with the model in a folder."""
    given = ["conf=echo", "model=hub", f"model.path={folder}", *overrides]
    given += ["model.dtype=float32", "model.autocast=float32"]
    if not any(each.startswith("model.lora.rank=") for each in overrides):
        given.append("model.lora.rank=0")
    return compose(given).config


def family_policy(folder: Path, *overrides: str) -> Policy:
    """Load the policy in a folder; an adapter gets random values, so that it has an effect."""
    model = family_run(folder, *overrides).model
    policy = load_policy(model, seed=0, device=torch.device("cpu"))
    if model.lora.rank:
        draw = torch.Generator().manual_seed(0)
        for _, values in policy.trained_parameters():
            values.data += 0.05 * torch.randn(values.shape, generator=draw)
    return policy
