"""Check the model beyond what `train` requires: the hub has it, it fits memory and disk, and how it
is sampled and trained.

Nothing is downloaded.
"""

from collections.abc import Iterator

import torch

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.machine import disk_line, find_shape, memory_line
from openenv_pipe.config.learning_rates import describe_lr, warn_of_lr
from openenv_pipe.config.precision import warn_of_precision
from openenv_pipe.config.schema import HubModelConfig, RunConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.forward.forward_check import UNPROBED, check_forward
from openenv_pipe.models.hub import (
    find_made_model,
    find_model_folder,
    is_on_this_machine,
    reject_unreachable,
)
from openenv_pipe.models.load import build_empty, load_policy
from openenv_pipe.models.teacher import find_teacher_shape

MAX_TRIED = 2_000_000_000  # parameters; a larger model is not loaded for a check


def check_hub(config: RunConfig) -> Iterator[Line]:
    """Ask the hub for a model that is not on this machine. Raises ConfigError without it."""
    model = config.model
    if not isinstance(model, HubModelConfig) or find_model_folder(model) is not None:
        return
    made = find_made_model(model)
    if made and not made.is_on_hub:
        yield Line("model", Result.OK, f"{model.path} will be converted to safetensors")
        return
    text = f"{model.path} is on the model hub and will be downloaded"
    try:
        reject_unreachable(model)
    except ConfigError as error:
        if made is None:
            raise
        text = f"{error}; will be downloaded as {made.about}"
    yield Line("model", Result.OK, text)


def check_lr(config: RunConfig) -> Iterator[Line]:
    """Say where the learning rate is from, and whether it is too large for pretrained weights."""
    if config.engine.capabilities.can_train and (text := describe_lr(config)):
        yield Line("learning rate", Result.OK, text)
        if warning := warn_of_lr(config):
            yield Line("learning rate", Result.WARN, warning)


def check_precision(config: RunConfig) -> Iterator[Line]:
    if warning := warn_of_precision(config):
        yield Line("precision", Result.WARN, warning)


def try_forward(config: RunConfig) -> Iterator[Line]:
    """Load the model on the CPU, and choose how it is sampled and trained, as `train` does.

    Raises ConfigError: no forward pass agrees with the model's own.
    """
    if not config.engine.capabilities.needs_tokenizer or not is_on_this_machine(config.model):
        return
    num_parameters = sum(each.numel() for each in build_empty(config.model).parameters())
    if num_parameters > MAX_TRIED or config.model.quantization != "none":
        text = "not tried: the model is large or quantized; the run chooses when it has loaded it"
        yield Line("forward", Result.OK, text)
        return
    max_tokens = config.max_episode_tokens
    policy = load_policy(
        config.model, seed=config.seed, device=torch.device("cpu"), max_tokens=max_tokens
    )
    packing = check_forward(policy, max_tokens)
    text = "trained in packed rows" if packing is None else f"trained in padded rows ({packing})"
    if config.engine.samples_in_process:
        why = [f"not {name}: {reason}" for name, reason in policy.samplers_left_out.items()]
        text += f"; sampling is {policy.sampler}" + (f" ({'; '.join(why)})" if why else "")
    yield Line("forward", Result.OK, text)
    if why_not := policy.left_out.get(UNPROBED):
        yield Line("forward", Result.WARN, f"not {UNPROBED}: {why_not}")


def check_memory(config: RunConfig) -> Iterator[Line]:
    if isinstance(config.model, HubModelConfig) and find_model_folder(config.model) is None:
        text = "not estimated: the model's size is known after its download"
        yield Line("memory", Result.WARN, text)
        return
    if (shape := find_shape(config.model)) is None:
        text = "not estimated: the model's config.json has other keys than decoders such as Qwen3"
        yield Line("memory", Result.WARN, text)
        return
    yield memory_line(config, shape, find_teacher_shape(config))
    yield disk_line(config, shape)
