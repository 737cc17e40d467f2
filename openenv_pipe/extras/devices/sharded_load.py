"""Load a sharded policy: each rank reads only its own rows of the weights from safetensors.

The model is built on torch's device `meta`, where it takes no memory, and is sharded there. Only a
tiny model, which is drawn from its seed, is whole on each rank's CPU before its shards are cut out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor

from openenv_pipe.config.schema import HubModelConfig, ModelConfig, TinyModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.devices.fsdp import Root, ShardedPolicy, as_shard_of, shard, shard_like
from openenv_pipe.extras.devices.ranks import ConnectedRanks
from openenv_pipe.extras.devices.shard_files import read_shapes, read_shards
from openenv_pipe.models.adapter import with_adapter
from openenv_pipe.models.forward.architecture_check import fix_rope_table, reject_unsupported
from openenv_pipe.models.forward.attention.packed import use_packed_attention
from openenv_pipe.models.hub import download_missing, find_model_folder
from openenv_pipe.models.load import DTYPES, build_empty, build_tiny, load_chat
from openenv_pipe.models.safetensors_only import plain_name, reject_other_weights
from openenv_pipe.system.out_of_memory import LOADING

OUT_OF_MEMORY_STAGE = LOADING
Values = Mapping[str, torch.Tensor]


def load_sharded_policy(
    config: ModelConfig,
    *,
    seed: int,
    device: torch.device,
    ranks: ConnectedRanks,
    num_replicas: int = 1,
    checkpoint: Path | None = None,
    max_tokens: int | None = None,
) -> ShardedPolicy:
    """Load the untrained policy, or the weights in a checkpoint's folder, on all ranks.

    num_replicas: see `fsdp.shard`.
    max_tokens: of an episode, for `fix_rope_table`.

    Ranks download a model that is not on their machine; on this one, rank 0 does before the others.

    Raises ConfigError: the model cannot be read, or it cannot be sharded.
    """
    download_missing(config)
    with ranks.joined("load_sharded", config, seed, num_replicas, checkpoint, max_tokens):
        return _load(config, seed, device, ranks, num_replicas, checkpoint, max_tokens)


def _load(
    config: ModelConfig,
    seed: int,
    device: torch.device,
    ranks: ConnectedRanks,
    num_replicas: int,
    checkpoint: Path | None,
    max_tokens: int | None,
) -> ShardedPolicy:
    transformers.logging.disable_progress_bar()
    chat = load_chat(config)
    model = build_empty(config)
    _reject_saved_buffers(model)
    reject_unsupported(model)
    use_packed_attention(model)
    drawn, folder = None, checkpoint if config.lora.rank == 0 else None
    if folder is None and isinstance(config, TinyModelConfig):
        drawn = build_tiny(config, chat.tokenizer, None)
    elif folder is None:
        assert isinstance(config, HubModelConfig)
        folder = find_model_folder(config)
        assert folder is not None
    _fill_buffers(model, device)
    fix_rope_table(model, max_tokens)
    for values in model.parameters():
        values.data = values.data.to(DTYPES[config.dtype])
    adapter: Values = {}
    if config.lora.rank:
        torch.manual_seed(seed)
        model, adapter = _with_adapter(model, config)
    root = shard(model, ranks, device, num_replicas=num_replicas)
    shards = _fill(root, device)
    if drawn is not None:
        _copy_shards(shards, drawn.state_dict())
    else:
        assert folder is not None
        reject_other_weights(str(folder))
        _check_names(shards, folder)
        read_shards(shards, folder)
    _copy_shards({name: root.model.get_parameter(name) for name in adapter}, adapter)
    policy = ShardedPolicy(
        root,
        ranks,
        chat,
        device=device,
        autocast=DTYPES[config.autocast],
        # Else the backward pass would need all weights in the precision of products.
        activation_checkpointing=config.activation_checkpointing or config.dtype != config.autocast,
    )
    if adapter and checkpoint is not None:
        policy.load_model(checkpoint)
    return policy


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Compute the buffers, such as frequencies of positions, as transformers does after loading.

    A buffer that it leaves out stays NaN, which `check_forward` rejects.
    """
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                nan = float("nan") if buffer.is_floating_point() else 0
                module._buffers[name] = torch.full_like(buffer, nan, device=device)
        if module._buffers:
            model._init_weights(module)


def _with_adapter(model: Any, config: ModelConfig) -> tuple[Any, Values]:
    """Add an adapter on the device `meta`, and return its initial values too.

    They are those of an unsharded policy. peft draws them on the device of the matrices, so in the
    meantime each matrix is replaced by a single number that is expanded to its shape.
    """
    empty: dict[int, torch.nn.Parameter] = {}
    stand_ins: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, values in module._parameters.items():
            if values is None:
                continue
            if id(values) not in stand_ins:
                number = torch.zeros((), dtype=values.dtype).expand(values.shape)
                stand_ins[id(values)] = torch.nn.Parameter(number)
                empty[id(stand_ins[id(values)])] = values
            module._parameters[name] = stand_ins[id(values)]
    model = with_adapter(model, config, None)
    adapter = {}
    for path, module in model.named_modules():
        for name, values in module._parameters.items():
            if values is None:
                continue
            if id(values) in empty:
                module._parameters[name] = empty[id(values)].requires_grad_(values.requires_grad)
            else:
                adapter[f"{path}.{name}"] = values.detach()
                on_meta = torch.empty_like(values, device="meta")
                module._parameters[name] = torch.nn.Parameter(on_meta)
    return model, adapter


def _fill(root: Root, device: torch.device) -> dict[str, torch.Tensor]:
    """Give memory to each shard on the device `meta`; return the base model's by their names.

    Tied weights stay one tensor.
    """
    made: dict[int, torch.nn.Parameter] = {}
    state = {}
    for name, values in root.named_parameters(remove_duplicate=False):
        if id(values) not in made:
            assert isinstance(values, DTensor)
            part = torch.empty_like(values.to_local(), device=device)
            filled = as_shard_of(values, part)
            made[id(values)] = torch.nn.Parameter(filled, requires_grad=values.requires_grad)
        state[name] = made[id(values)]
    root.load_state_dict(state, strict=False, assign=True)
    return {
        plain_name(name.removeprefix("model.").removeprefix("base_model.model.")): values.detach()
        for name, values in root.named_parameters()
        if ".lora_" not in name
    }


@torch.no_grad()
def _copy_shards(shards: Values, whole: Values) -> None:
    for name, values in shards.items():
        assert isinstance(values, DTensor)
        values.to_local().copy_(shard_like(whole[name], values))


def _check_names(weights: Values, folder: Path) -> None:
    """Raise ConfigError if a folder's files do not have the weights under their own names."""
    found = read_shapes(folder)
    unfit = next((n for n, each in weights.items() if found.get(n) != tuple(each.shape)), None)
    if unfit is not None:
        raise ConfigError(
            f"trainer.parallel=fsdp reads weights part by part, and {folder} has no tensor "
            f"{unfit!r} of shape {list(weights[unfit].shape)} (found: {found.get(unfit)}): "
            "transformers converts the weights of this architecture; set trainer.parallel=data"
        )


def check_shardable(config: ModelConfig) -> None:
    """Check whether a model's weights can be read part by part, if it is on this machine.

    Raises ConfigError: they cannot.
    """
    folder = find_model_folder(config) if isinstance(config, HubModelConfig) else None
    if folder is not None:
        model = build_empty(config)
        _reject_saved_buffers(model)
        _check_names(dict(model.named_parameters()), folder)


def _reject_saved_buffers(model: Any) -> None:
    """Raise ConfigError if the model's files have more than parameters, which alone are read."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if buffers := [name for name in model.state_dict() if name not in parameters]:
        raise ConfigError(
            f"trainer.parallel=fsdp reads parameters alone, and this model's files also have "
            f"{len(buffers)} buffers, such as {buffers[0]}; set trainer.parallel=data"
        )
