"""Tiny folders of model families, as a hub's repository has them.

Weights are drawn wide, so that a wrong mask, position or name changes logprobs by far more than
rounding does: with transformers' own 0.02 a model of this size answers almost uniformly.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from fakes import random_samples

from openenv_pipe.algorithms.packing import pack
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
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
LATENT = {  # attention of DeepSeek
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
DEEPSEEK = ROUTED | LATENT | {"n_group": 2, "topk_group": 1}
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


def own_logprobs(folder, ids, temperature=1.0, num_tokens=0):
    """The logprobs [T, V] of transformers alone, at the beginning of a row of `num_tokens`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    row = [*ids, *[7] * (num_tokens - len(ids))]
    with torch.inference_mode():
        logits_TV = model(torch.tensor([row])).logits[0, : len(ids)]
    return torch.log_softmax(logits_TV / temperature, dim=-1)


@torch.inference_mode()
def engine_difference(policy, folder, lengths, num_tokens=0):
    """Return the largest difference of the engine's logprobs from transformers' for rows of these
    lengths, which get a turn of one token and another one of several."""
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(5, 250, (length,), generator=draw).tolist() for length in lengths]
    expected = [own_logprobs(folder, row, num_tokens=num_tokens) for row in rows]
    firsts = [len(row) // 2 for row in rows]
    (forward,) = policy.row_forwards(1)
    forward.reserve_rows(len(rows))

    def difference(logits, ends):
        got = torch.log_softmax(logits.float(), dim=-1)
        pairs = zip(got, expected, ends, strict=True)
        return max((mine - theirs[end - 1]).abs().max().item() for mine, theirs, end in pairs)

    heads = [row[:first] for row, first in zip(rows, firsts, strict=True)]
    found = [difference(forward.feed(heads, [0] * len(rows)), firsts)]
    step = torch.tensor([row[first] for row, first in zip(rows, firsts, strict=True)])
    found.append(difference(forward.step(step, torch.tensor(firsts)), [k + 1 for k in firsts]))
    tails = [row[first + 1 :] for row, first in zip(rows, firsts, strict=True)]
    found.append(difference(forward.feed(tails, [k + 1 for k in firsts]), lengths))
    return max(found)


def learner_difference(policy, folder, temperature=1.0, num_tokens=0):
    """Return the largest difference of the learner's logprobs from transformers'."""
    samples = random_samples(0)
    batch = pack(samples, share=policy.packs_rows, device=policy.device)
    with torch.inference_mode():
        learned_N = policy.logprobs(batch, temperature)[0]
    rows = [
        (each, own_logprobs(folder, each.token_ids, temperature, num_tokens)) for each in samples
    ]
    expected = [
        logprobs[place - 1, sample.token_ids[place]]
        for sample, logprobs in rows
        for place, is_trained in enumerate(sample.loss_mask)
        if is_trained
    ]
    return (learned_N - torch.stack(expected)).abs().max().item()
