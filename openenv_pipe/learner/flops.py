"""The FLOPs of a loaded model, and the FLOP/s that this device reaches in a matrix product."""

import time
from functools import cache
from typing import Any

import torch

from openenv_pipe.models.flop_count import FlopCount
from openenv_pipe.models.forward.architecture_check import find_decoder
from openenv_pipe.models.forward.gated_mlp import LastLayer
from openenv_pipe.models.quantization import num_values

CPU_SIZE, GPU_SIZE = 1024, 8192  # of the square matrices whose product is timed
NUM_TRIALS = 5


def count_flops(model: Any) -> FlopCount:
    """Return the counter of a loaded model, adapters included."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder, config = find_decoder(inner), inner.config.get_text_config()
    last = [layer.mlp for layer in decoder.modules() if isinstance(layer, LastLayer)]
    # The heads of Gemma 4 differ between layers.
    differs = getattr(config, "is_heterogeneous", False)
    layers = config.per_layer_config if differs else [config] * config.num_hidden_layers
    return FlopCount(
        num_weights=_num_weights(decoder),
        num_last_weights=sum(map(_num_weights, last)),
        num_head_weights=inner.get_output_embeddings().weight.numel(),
        attention_width=sum(map(_attention_width, layers)),
        trains_all=all(parameter.requires_grad for parameter in model.parameters()),
    )


def _attention_width(config: Any) -> int:
    """Return the width of the queries of one layer."""
    num_heads: int = getattr(config, "num_attention_heads", 0)  # Mamba has no attention.
    head_size: int = getattr(config, "head_dim", None) or config.hidden_size // max(num_heads, 1)
    return num_heads * head_size


def _num_weights(module: torch.nn.Module) -> int:
    """Count the values of the matrices of linear layers."""
    layers = (each for each in module.modules() if isinstance(each, torch.nn.Linear))
    return sum(num_values(each.weight) for each in layers)


@cache
def matrix_flops_per_s(device: torch.device, dtype: torch.dtype, num_threads: int) -> float:
    """Measure the FLOP/s of a large matrix product, the upper bound for an update; best of 5.

    Measured once per process and number of torch threads.
    """
    size = CPU_SIZE if device.type == "cpu" else GPU_SIZE
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    best_s = float("inf")
    for _ in range(NUM_TRIALS):
        _finish(device)
        started = time.perf_counter()
        matrix @ matrix
        _finish(device)
        best_s = min(best_s, time.perf_counter() - started)
    return 2 * size**3 / best_s


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
