"""A frozen model's matrices in four bits (QLoRA, arXiv:2305.14314), by bitsandbytes.

NF4 in blocks of 64 with a scale each, which are quantized themselves. It holds for the linear
layers of the decoder whose rows are whole blocks; embedding, head, norms and the experts of a
mixture stay as they are. A product is made with the matrix as it is written out again, whoever
makes it: a server of the policy and an exported model get it written out. Refused here: training
what is quantized.
"""

import math
from types import ModuleType
from typing import Any

import torch

from openenv_pipe.errors import ConfigError

SETTING = "model.quantization=nf4"
BLOCK_SIZE = 64  # and what bitsandbytes reads on a CPU: other rows come back as something else


def load_bitsandbytes(setting: str) -> ModuleType:
    """The package, for a setting that needs it. Raises ConfigError."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(
            f"{setting} needs the package bitsandbytes ({error}); "
            "pip install 'openenv-pipe[quantization]'"
        ) from error
    return bitsandbytes


def quantize(model: Any, *, precision: torch.dtype, device: torch.device) -> None:
    """Puts the decoder's linear layers in four bits, on the device, one after another.

    precision: of the products. Raises ConfigError where the package or such layers are missing.
    """
    layers = load_bitsandbytes(SETTING).nn
    decoder = model.get_decoder()
    chosen = [
        name
        for name, module in decoder.named_modules()
        if type(module) is torch.nn.Linear and module.in_features % BLOCK_SIZE == 0
    ]
    if not chosen:
        raise ConfigError(
            f"{SETTING}, but the model has no linear layer whose inputs are a multiple of "
            f"{BLOCK_SIZE}; set model.quantization=none"
        )
    for name in chosen:
        small = _in_four_bits(decoder.get_submodule(name), layers, precision)
        decoder.set_submodule(name, small.to(device))
    model.is_loaded_in_4bit = True  # by which peft knows what it adapts


def _in_four_bits(dense: torch.nn.Linear, layers: ModuleType, precision: torch.dtype) -> Any:
    """The layer; its weights are quantized when it is moved to a device."""
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
    # Where the CPU can, bitsandbytes would lay the weights out anew at the first pass without
    # gradients, for a product in bfloat16 that none can go back through.
    small.support_avx512bf16_for_cpu = False
    return small


def num_values(parameter: torch.Tensor) -> int:
    """How many weights a parameter stands for."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def dense_state(model: Any) -> dict[str, torch.Tensor]:
    """The model's state dict, with each quantized matrix written out again."""
    state = model.state_dict()
    for name, module in model.named_modules():
        quantized = getattr(getattr(module, "weight", None), "quant_state", None)
        if not isinstance(module, torch.nn.Linear) or quantized is None:
            continue
        for key in [key for key in state if key.startswith(f"{name}.weight.")]:
            del state[key]  # its scales
        functional = load_bitsandbytes(SETTING).functional
        state[f"{name}.weight"] = functional.dequantize_4bit(module.weight.data, quantized)
    return state
