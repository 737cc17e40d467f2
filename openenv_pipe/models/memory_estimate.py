"""Estimate the memory and disk space of a run before anything is loaded.

Weights are counted exactly; activations are those of decoders with gated MLPs. On a CPU the learner
is within a fifth of what its first steps took, and a vLLM server within a tenth. On a GPU the
estimate is at most 1.5 times what one shape took on an H200 (`tests/unit/test_memory_estimate.py`).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv_pipe.config.schema import HubModelConfig, RunConfig, TinyModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.model_files import read_header

BYTES = {"float32": 4, "bfloat16": 2}
TINY_VOCABULARY = 261  # 256 bytes and five markers
LOGITS_AT_ONCE = 7 << 20  # the kept logits and three stretches in progress
GPU_LOGITS_AT_ONCE = 3 << 27  # on a GPU: one stretch in three forms
PROCESS = 420 << 20  # measured: torch, transformers and peft before a model is loaded
WORKSPACE = 30 << 20  # measured: memory that kernels keep
SPREAD = 1.4  # measured: more than a quarter of the memory is lost between short-lived tensors,
SPREAD_WITH_ADAPTERS = 1.8  # and nearly half if the small tensors of adapters lie among them
LARGE_ACTIVATIONS = 1 << 30  # on a CPU; from here on a long run takes more than its first steps
SPREAD_ON_GPU = 1.18  # measured on an H200, with adapters and without
OF_AN_UPDATE = ("gradients", "activations", "logits")
OF_A_ROLLOUT = ("cache of the engine", "weights of the engine")
OPTIMIZER_COPIES = 2  # Adam's two moments
BLOCK_OF_MOMENTS = 256  # one-byte values that have one scale in common
FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes per weight: NF4, its scales, and their scales
BYTES_PER_EPISODE_TOKEN = 12  # id, mask, logprob and text in a run folder, compressed


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The dimensions of a model that determine its size."""

    num_parameters: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    attention_width: int  # all query heads together
    cache_width: int  # all key heads together
    vocabulary: int


def decoder_shape(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    vocabulary: int,
    is_tied: bool,
    has_head_norms: bool,
) -> Shape:
    """Return the shape of a decoder without biases, with its parameters counted.

    is_tied: embeddings and head are one matrix. has_head_norms: as those of Qwen3.
    """
    attention_width, cache_width = num_heads * head_size, num_kv_heads * head_size
    layer = (
        2 * hidden_size * (attention_width + cache_width)
        + 3 * hidden_size * intermediate_size
        + 2 * (hidden_size + (head_size if has_head_norms else 0))
    )
    embeddings = (1 if is_tied else 2) * vocabulary * hidden_size
    return Shape(
        num_parameters=embeddings + num_layers * layer + hidden_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        attention_width=attention_width,
        cache_width=cache_width,
        vocabulary=vocabulary,
    )


def tiny_shape(config: TinyModelConfig) -> Shape:
    return decoder_shape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        vocabulary=TINY_VOCABULARY,
        is_tied=True,
        has_head_norms=True,
    )


def read_folder_shape(config: HubModelConfig, folder: Path) -> Shape | None:
    """Read a model's shape from its config.json and the headers of its safetensors files.

    Returns None if the config.json has other keys; see `model_shape`.

    Raises ConfigError: the files are missing or of another kind.
    """
    try:
        settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
        weights = sorted(folder.glob("*.safetensors"))
        if not weights:
            raise FileNotFoundError(f"there are no *.safetensors files in {folder}")
        entries = (item for path in weights for item in read_header(path)[1].items())
        sizes = (math.prod(entry["shape"]) for name, entry in entries if name[:2] != "__")
        return model_shape(settings, sum(sizes))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"model.path={config.path!r} ({folder}) cannot be read: {error}; expected config.json "
            "and *.safetensors of a causal language model"
        ) from error


def model_shape(config: Mapping[str, Any], num_parameters: int) -> Shape | None:
    """Read a model's shape from config.json; None if that lacks the usual keys, as GPT-2's does.

    Such a model can be trained, but its memory cannot be estimated.
    """
    try:
        heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
        head_size = config.get("head_dim") or hidden_size // heads
        return Shape(
            num_parameters=num_parameters,
            hidden_size=hidden_size,
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            attention_width=heads * head_size,
            cache_width=(config.get("num_key_value_heads") or heads) * head_size,
            vocabulary=config["vocab_size"],
        )
    except KeyError:
        return None


def num_in_layers(shape: Shape) -> int:
    """Count the weights of the decoder's linear layers; a mixture's experts are not counted."""
    attention = 2 * shape.hidden_size * (shape.attention_width + shape.cache_width)
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size
    return min(shape.num_parameters, shape.num_layers * layer)


def num_trained(shape: Shape, config: RunConfig) -> int:
    """Count the parameters that are trained: all, or those of adapters on every linear layer."""
    rank = config.model.lora.rank
    if rank == 0:
        return shape.num_parameters
    attention = 4 * shape.hidden_size + 2 * (shape.attention_width + shape.cache_width)
    return shape.num_layers * rank * (attention + 3 * (shape.hidden_size + shape.intermediate_size))


def memory_bytes(
    shape: Shape, config: RunConfig, *, in_one_memory: bool, teachers: Sequence[Shape] = ()
) -> dict[str, int]:
    """Estimate what training holds, by kind, in bytes; see `while_learning` and `at_rest`.

    in_one_memory: count all ranks of this machine, as on a CPU; else the first, which needs most.
    teachers: the shapes of those on this machine.
    """
    model, trainer = config.model, config.trainer
    num_ranks = config.ranks_per_node if in_one_memory else 1
    of_rank = _rank_bytes(shape, config, on_gpu=not in_one_memory)
    needed = {kind: num_ranks * size for kind, size in of_rank.items()}
    if teachers:
        needed["teacher"] = sum(each.num_parameters for each in teachers) * BYTES[model.autocast]
    engine = config.engine
    if engine.samples_in_process and trainer.max_staleness:
        needed["the sampler's copy"] = trained_bytes(shape, config)
    # The frozen copies that play against the policy, in evaluations and in leagues.
    each_env = config.environments.values()
    checkpoints = {each.opponent_checkpoint for each in each_env} - {None}
    leagues = [each.env.league for each in each_env if each.env.league is not None]
    if num_frozen := len(checkpoints) + sum(league.size for league in leagues):
        needed["opponents"] = num_frozen * trained_bytes(shape, config)
    if num_sampled := engine.sampled_at_once(config.capacity):
        num_cached = min(num_sampled, trainer.episodes_per_step)
        per_cached = 2 * shape.cache_width * shape.num_layers * BYTES[model.autocast]
        needed["cache of the engine"] = num_cached * config.max_episode_tokens * per_cached
        if in_one_memory and model.dtype == "float32":
            # The copies of weights for fast sampling, whose embeddings are not rounded. A
            # model of another architecture is sampled without a copy.
            embedding = shape.vocabulary * shape.hidden_size * BYTES["float32"]
            per_copy = shape.num_parameters * BYTES[model.autocast] + embedding
            # In a step one member of each league plays, and in an evaluation one checkpoint.
            num_copies = 1 + max(bool(checkpoints), len(leagues))
            needed["weights of the engine"] = num_copies * per_copy
    return needed


def while_learning(needed: Mapping[str, int], config: RunConfig) -> dict[str, int]:
    """Select what is held in an update: not what the engine frees before it."""
    freed = () if config.trainer.max_staleness else OF_A_ROLLOUT
    return {kind: size for kind, size in needed.items() if kind not in freed}


def at_rest(needed: Mapping[str, int]) -> dict[str, int]:
    """Select what is held between two updates too."""
    return {kind: size for kind, size in needed.items() if kind not in OF_AN_UPDATE}


def _rank_bytes(shape: Shape, config: RunConfig, *, on_gpu: bool) -> dict[str, int]:
    """Estimate what each of trainer.devices holds for learning."""
    model, trainer = config.model, config.trainer
    weights, trained = weight_bytes(shape, config), trained_bytes(shape, config)
    share, gathered, gathered_gradients = 1.0, 0.0, 0.0  # fractions of all weights
    if config.trainer.is_sharded:
        in_layers = num_in_layers(shape) / shape.num_parameters
        share, of_a_layer = trainer.replicas / trainer.devices, in_layers / shape.num_layers
        gathered = 1.0 - in_layers + 2 * of_a_layer  # one layer works, and the next is fetched
        gathered_gradients = 0.0 if model.lora.rank else 1.0 - in_layers + of_a_layer
    num_episodes = -(-trainer.episodes_per_step // trainer.devices)
    longest = config.max_episode_tokens  # is a batch of its own, if it exceeds the limit
    tokens = max(longest, min(trainer.tokens_per_batch, num_episodes * longest))
    logits_at_once = GPU_LOGITS_AT_ONCE if on_gpu else LOGITS_AT_ONCE
    held = weights * (share + gathered) + (trained * share if model.lora.rank else 0)
    needed = {
        "python and its libraries": PROCESS,
        "weights": int(held),
        "gradients": int(trained * (share + gathered_gradients)),
        "optimizer": int(_moments(shape, config) * share),
        "activations": _activations(shape, config, tokens, on_gpu=on_gpu) + WORKSPACE,
        "logits": min(tokens * shape.vocabulary, logits_at_once) * 4,
    }
    # The reference of an adapter that is never refreshed is the model without it.
    kl = trainer.loss.kl
    if kl.coef and not kl.reference and not kl.hint and (model.lora.rank == 0 or kl.refresh_every):
        needed["reference model"] = int(trained * share)
    return needed


def _is_rounded(config: RunConfig) -> bool:
    return config.model.dtype != config.model.autocast


def is_checkpointed(config: RunConfig) -> bool:
    """Return whether the backward pass computes activations again."""
    return config.model.activation_checkpointing or (
        config.trainer.is_sharded and _is_rounded(config)
    )


def weight_bytes(shape: Shape, config: RunConfig) -> int:
    """Return the size of the model without its adapter."""
    width = BYTES[config.model.dtype]
    if config.model.quantization == "none":
        return shape.num_parameters * width
    return int(shape.num_parameters * width - num_in_layers(shape) * (width - FOUR_BITS))


def trained_bytes(shape: Shape, config: RunConfig) -> int:
    """Return the size of the weights that are trained: all, or the adapter's."""
    return num_trained(shape, config) * (4 if config.model.lora.rank else BYTES[config.model.dtype])


def _moments(shape: Shape, config: RunConfig) -> int:
    """Return the size of the optimizer's state."""
    if config.trainer.optimizer.type == "adamw_8bit":
        per_moment = 1 + 4 / BLOCK_OF_MOMENTS
        return int(num_trained(shape, config) * OPTIMIZER_COPIES * per_moment)
    return trained_bytes(shape, config) * OPTIMIZER_COPIES


def _activations(shape: Shape, config: RunConfig, tokens: int, *, on_gpu: bool) -> int:
    """Estimate what a forward pass keeps for the backward pass, from what torch saves.

    Per layer: six times the hidden state (norms and residual stream), the heads before and after
    norm and rotation, and the MLP's four products. In bfloat16 autocast, products are half as
    large, but the weights exist a second time. The rest is in float32 on a CPU; on a GPU the hidden
    state is of the weights' type, and the heads are products.
    """
    product = BYTES[config.model.autocast]
    hidden, head = (BYTES[config.model.dtype], product) if on_gpu else (4, 4)
    layer = 6 * shape.hidden_size * hidden + 4 * shape.intermediate_size * product
    layer += 4 * (shape.attention_width + shape.cache_width) * head
    is_rounded, is_sharded = _is_rounded(config), config.trainer.is_sharded
    if is_checkpointed(config):
        kept = shape.num_layers * shape.hidden_size * hidden + layer
    else:
        kept = shape.num_layers * layer
    num_rounded = shape.num_parameters  # Four-bit weights are dequantized one layer at a time.
    if config.model.quantization != "none":
        num_rounded -= num_in_layers(shape)
    if is_sharded:
        num_rounded = num_in_layers(shape) // shape.num_layers
    rounded_weights = num_rounded * product if is_rounded else 0
    spread = SPREAD_WITH_ADAPTERS if config.model.lora.rank else SPREAD
    spread = SPREAD_ON_GPU if on_gpu else spread
    return int(tokens * kept * spread) + rounded_weights


def growth_on_cpu(held: Mapping[str, int]) -> int:
    """Return what a long run takes more than its first steps: as much as its large activations.

    Measured with SmolLM2-135M: 6.5 GiB at first, and 10.5 GiB from the 60th supervised step on.
    Batches of different lengths leave gaps in the heap. The runs of small models do not grow.
    """
    activations = held.get("activations", 0)
    return activations if activations >= LARGE_ACTIVATIONS else 0


def disk_bytes(shape: Shape, config: RunConfig) -> int:
    """Estimate checkpoints, some with the optimizer, and all episodes at full length, in bytes."""
    trainer = config.trainer
    saved = trainer.checkpoint
    num_written = trainer.steps // saved.every + 2  # the first and the last included
    num_kept = min(num_written, saved.keep_last + 1 if saved.keep_last else num_written)
    num_kept += saved.every_minutes is not None
    num_resumable = min(num_kept, saved.num_resumable + 1)  # one more while the next is written
    weights, moments = trained_bytes(shape, config), _moments(shape, config)
    checkpoints = weights * num_kept + moments * num_resumable
    num_episodes = trainer.steps * trainer.episodes_per_step
    num_episodes += sum(map(_num_eval_episodes, config.environments.values()))
    episodes = num_episodes * config.max_episode_tokens * BYTES_PER_EPISODE_TOKEN
    return checkpoints + episodes


def _num_eval_episodes(config: RunConfig) -> int:
    """Count the episodes of three evaluations, greedy rows, baselines, and those between."""
    settings, during = config.eval, config.eval.during
    num_players = len(config.env.baselines) if settings.baselines else 0
    of_one = settings.num_tasks * settings.samples_per_task
    between = (during.num_tasks or settings.num_tasks) * (
        during.samples_per_task or settings.samples_per_task
    )
    num_between = config.trainer.steps // during.every if during.every else 0
    greedy = 3 * settings.num_tasks if settings.greedy else 0
    return (3 + num_players) * of_one + greedy + num_between * between
