"""Model FLOPs of an update, and the FLOP/s that this device reaches in a matrix product.

Only the model's matrix products count, each once: recomputation that saves memory, norms,
softmaxes, the optimizer and the experts of a mixture are left out.
"""

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from openenv_pipe.models.quantization import num_values

CPU_SIZE, GPU_SIZE = 1024, 8192  # of the square matrices whose product is timed
NUM_TRIALS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The sizes of a batch that determine its FLOPs."""

    num_tokens: int  # tokens that go through the decoder
    num_contexts: int  # tokens that each of them attends to, itself included, summed
    num_predicted: int  # tokens that go through the head


class ModelFlops:
    """Counts the floating point operations of passes through one model."""

    def __init__(self, model: Any) -> None:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        decoder, config = inner.get_decoder(), inner.config.get_text_config()
        matrices = [m.weight for m in decoder.modules() if isinstance(m, torch.nn.Linear)]
        head_size = getattr(config, "head_dim", None)
        head_size = head_size or config.hidden_size // config.num_attention_heads
        self._num_weights = sum(map(num_values, matrices))  # adapters included
        self._num_head_weights = inner.get_output_embeddings().weight.numel()
        self._attention_width = config.num_hidden_layers * config.num_attention_heads * head_size
        self._trains_all = all(parameter.requires_grad for parameter in model.parameters())

    def forward(self, size: Size) -> int:
        return self._matrices(size) + self._attention(size)

    def forward_and_backward(self, size: Size) -> int:
        """Count a forward and a backward pass.

        The backward pass makes two products for each of the forward pass, one for each factor's
        gradient, and only one if a factor is a frozen weight.
        """
        return (3 if self._trains_all else 2) * self._matrices(size) + 3 * self._attention(size)

    def _matrices(self, size: Size) -> int:
        head = self._num_head_weights * size.num_predicted
        return 2 * (self._num_weights * size.num_tokens + head)

    def _attention(self, size: Size) -> int:
        """Count the products of queries with keys and of probabilities with values."""
        return 4 * self._attention_width * size.num_contexts


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
