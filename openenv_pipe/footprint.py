"""How much memory and disk a run will need, before anything is loaded. Estimates.

Weights are counted exactly; activations are those of decoders with gated MLPs, and within a fifth
of what is measured on a CPU (`tests/unit/test_footprint.py`).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv_pipe.config.schema import RunConfig, TinyModelConfig

BYTES = {"float32": 4, "bfloat16": 2}
TINY_VOCABULARY = 261  # 256 bytes and five markers
LOGITS_AT_ONCE = 7 << 20  # those that are kept, and three stretches of those at hand
PROCESS = 420 << 20  # measured: torch, transformers and peft, before a model is there
WORKSPACE = 30 << 20  # measured: what kernels keep for themselves
SPREAD = 1.4  # measured: where tensors come and go, more than a quarter lies between them,
SPREAD_WITH_ADAPTERS = 1.8  # and nearly half where the small ones of adapters stay there
OPTIMIZER_COPIES = 2  # Adam's two moments
BYTES_PER_EPISODE_TOKEN = 12  # id, mask, logprob and text in a run folder, compressed


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What of a model decides its size."""

    num_parameters: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    attention_width: int  # all heads together
    cache_width: int  # all key heads together
    vocabulary: int


def tiny_shape(config: TinyModelConfig) -> Shape:
    """The shape of a model that is built from its block; its embeddings are tied."""
    attention_width = config.num_heads * config.head_size
    cache_width = config.num_kv_heads * config.head_size
    layer = (
        2 * config.hidden_size * (attention_width + cache_width)
        + 3 * config.hidden_size * config.intermediate_size
        + 2 * (config.hidden_size + config.head_size)
    )
    embeddings = TINY_VOCABULARY * config.hidden_size
    return Shape(
        num_parameters=embeddings + config.num_layers * layer + config.hidden_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        attention_width=attention_width,
        cache_width=cache_width,
        vocabulary=TINY_VOCABULARY,
    )


def folder_shape(folder: Path) -> Shape:
    """The shape of a model from its config.json and its safetensors files' headers.

    Raises OSError, ValueError or KeyError where they are missing or of another kind.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
    head_size = config.get("head_dim") or hidden_size // heads
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise FileNotFoundError(f"there are no *.safetensors files in {folder}")
    return Shape(
        num_parameters=sum(map(_count_parameters, weights)),
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        attention_width=heads * head_size,
        cache_width=config.get("num_key_value_heads", heads) * head_size,
        vocabulary=config["vocab_size"],
    )


def _count_parameters(path: Path) -> int:
    """A safetensors file begins with the length of its header, which is JSON."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name[:2] != "__")


def num_trained(shape: Shape, config: RunConfig) -> int:
    """Parameters that learn: all, or those of the adapter on every linear layer."""
    rank = config.model.lora.rank
    if rank == 0:
        return shape.num_parameters
    attention = 4 * shape.hidden_size + 2 * (shape.attention_width + shape.cache_width)
    return shape.num_layers * rank * (attention + 3 * (shape.hidden_size + shape.intermediate_size))


def memory_bytes(shape: Shape, config: RunConfig) -> dict[str, int]:
    """What is held at the same time in training, by its kind."""
    model, trainer = config.model, config.trainer
    weights = shape.num_parameters * BYTES[model.dtype]
    full = model.lora.rank == 0
    trained_bytes = num_trained(shape, config) * (BYTES[model.dtype] if full else 4)
    num_episodes = trainer.tasks_per_step * trainer.group_size
    tokens = min(trainer.tokens_per_batch, num_episodes * config.env.max_episode_tokens)
    needed = {
        "python and its libraries": PROCESS,
        "weights": weights + (0 if full else trained_bytes),
        "gradients and optimizer": trained_bytes * (1 + OPTIMIZER_COPIES),
        "activations": _activations(shape, config, tokens) + WORKSPACE,
        "logits": min(tokens * shape.vocabulary, LOGITS_AT_ONCE) * 4,
    }
    if trainer.loss.kl.coef and full:
        needed["reference model"] = weights
    if config.engine.type == "local" and trainer.max_staleness:
        needed["the sampler's copy"] = trained_bytes
    if config.engine.type == "local":
        num_cached = min(config.engine.max_batch, num_episodes)
        per_cached = 2 * shape.cache_width * shape.num_layers * BYTES[model.autocast]
        needed["cache of the engine"] = num_cached * config.env.max_episode_tokens * per_cached
    return needed


def _activations(shape: Shape, config: RunConfig, tokens: int) -> int:
    """What a forward pass keeps for the backward pass, counted in what torch saves.

    Of each layer: norms and the residual stream six times, heads before and after their norm and
    rotation, in float32; and the MLP's four products. In bfloat16 autocast products are half as
    large, but the weights are there once more.
    """
    product = BYTES[config.model.autocast]
    heads = shape.attention_width + shape.cache_width
    layer = (6 * shape.hidden_size + 4 * heads) * 4 + 4 * shape.intermediate_size * product
    if config.model.activation_checkpointing:
        kept = shape.num_layers * shape.hidden_size * 4 + layer
    else:
        kept = shape.num_layers * layer
    is_rounded = config.model.dtype != config.model.autocast
    rounded_weights = shape.num_parameters * product if is_rounded else 0
    spread = SPREAD_WITH_ADAPTERS if config.model.lora.rank else SPREAD
    return int(tokens * kept * spread) + rounded_weights


def disk_bytes(shape: Shape, config: RunConfig) -> int:
    """Checkpoints, some with their optimizer, and every token of every episode at its longest."""
    trainer = config.trainer
    width = BYTES[config.model.dtype] if config.model.lora.rank == 0 else 4
    weights = num_trained(shape, config) * width
    saved = trainer.checkpoint
    num_written = trainer.steps // saved.every + 2  # the first and the last
    num_kept = min(num_written, saved.keep_last + 1 if saved.keep_last else num_written)
    num_resumable = min(num_kept, saved.num_resumable + 1)  # one more while the next is written
    checkpoints = weights * (num_kept + OPTIMIZER_COPIES * num_resumable)
    num_episodes = trainer.steps * trainer.tasks_per_step * trainer.group_size
    num_episodes += _num_eval_episodes(config)
    episodes = num_episodes * config.env.max_episode_tokens * BYTES_PER_EPISODE_TOKEN
    return checkpoints + episodes


def _num_eval_episodes(config: RunConfig) -> int:
    """Those of the three stages, greedy ones if asked for, scripted players, and between steps."""
    settings, during = config.eval, config.eval.during
    num_players = len(config.env.baselines) if settings.baselines else 0
    of_one = settings.num_tasks * settings.samples_per_task
    between = (during.num_tasks or settings.num_tasks) * (
        during.samples_per_task or settings.samples_per_task
    )
    num_between = config.trainer.steps // during.every if during.every else 0
    greedy = 3 * settings.num_tasks if settings.greedy else 0
    return (3 + num_players) * of_one + greedy + num_between * between
