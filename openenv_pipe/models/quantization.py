"""Quantize a frozen model's matrices to four bits (QLoRA, arXiv:2305.14314) by bitsandbytes.

NF4 in blocks of 64, with scales that are quantized themselves. This covers the decoder's linear
layers whose rows are whole blocks; embedding, head, norms and a mixture's experts stay as they are.
Products use the dequantized matrix, and servers of the policy and exported models receive it.
Quantized weights cannot be trained.
"""

import math
from types import ModuleType
from typing import Any

import torch

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.optional_packages import needed_by

SETTING = "model.quantization=nf4"
BLOCK_SIZE = 64  # the only size that bitsandbytes reads back correctly on a CPU


def load_bitsandbytes(setting: str) -> ModuleType:
    """Import bitsandbytes for a setting that needs it. Raises ConfigError if it is missing."""
    with needed_by(setting, "bitsandbytes"):
        import bitsandbytes
    return bitsandbytes


def find_quantizable(decoder: Any) -> list[str]:
    """Return the names of linear layers that can be quantized. Raises ConfigError if none can."""
    names = [
        name
        for name, module in decoder.named_modules()
        if type(module) is torch.nn.Linear and module.in_features % BLOCK_SIZE == 0
    ]
    if not names:
        raise ConfigError(
            f"{SETTING}, but the model has no linear layer whose inputs are a multiple of "
            f"{BLOCK_SIZE}; set model.quantization=none"
        )
    return names


def quantize(model: Any, *, precision: torch.dtype, device: torch.device) -> None:
    """Quantize the decoder's linear layers on the device, one after another.

    precision: of the products.

    Raises ConfigError: bitsandbytes or suitable layers are missing.
    """
    layers = load_bitsandbytes(SETTING).nn
    decoder = model.get_decoder()
    for name in find_quantizable(decoder):
        small = _in_four_bits(decoder.get_submodule(name), layers, precision)
        decoder.set_submodule(name, small.to(device))
    model.is_loaded_in_4bit = True  # tells peft how to adapt the layers


def _in_four_bits(dense: torch.nn.Linear, layers: ModuleType, precision: torch.dtype) -> Any:
    """Return the layer in four bits; its weights are quantized when it is moved to a device."""
    how = {"compress_statistics": True, "quant_type": "nf4"}
    small = layers.Linear4bit(
        dense.in_features,
        dense.out_features,
        bias=False,
        compute_dtype=precision,
        device="meta",
        **how,
    )
    small.weight = layers.Params4bit(
        dense.weight.data, requires_grad=False, blocksize=BLOCK_SIZE, module=small, **how
    )
    small.bias = dense.bias
    # On some CPUs, bitsandbytes would rearrange the weights in the first pass without gradients,
    # for a bfloat16 product that has no backward pass.
    small.support_avx512bf16_for_cpu = False
    return small


def num_values(parameter: torch.Tensor) -> int:
    """Return the number of weights that a parameter stands for."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def dense_state(model: Any) -> dict[str, torch.Tensor]:
    """Return the model's state dict with quantized matrices dequantized."""
    state = model.state_dict()
    for name, module in model.named_modules():
        quantized = getattr(getattr(module, "weight", None), "quant_state", None)
        if not isinstance(module, torch.nn.Linear) or quantized is None:
            continue
        for key in [key for key in state if key.startswith(f"{name}.weight.")]:
            del state[key]  # the scales
        functional = load_bitsandbytes(SETTING).functional
        state[f"{name}.weight"] = functional.dequantize_4bit(module.weight.data, quantized)
    return state
