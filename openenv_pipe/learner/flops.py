"""How much arithmetic an update asks for, and how much of it this machine does in a second.

Counted are the products of the model itself, once: what is computed again to save memory is not,
nor are norms, softmaxes and the optimizer. Matrices only: experts of a mixture are left out.
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
    """What of a batch decides its cost."""

    num_tokens: int  # that go through the decoder
    num_contexts: int  # how many tokens each of them attends to, itself included, summed
    num_predicted: int  # that go through the head


class ModelFlops:
    """Floating point operations of passes through one model."""

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
        """The backward pass makes each product twice, for the gradients of both its factors; once
        where one of them is a weight that is not trained."""
        return (3 if self._trains_all else 2) * self._matrices(size) + 3 * self._attention(size)

    def _matrices(self, size: Size) -> int:
        head = self._num_head_weights * size.num_predicted
        return 2 * (self._num_weights * size.num_tokens + head)

    def _attention(self, size: Size) -> int:
        """Queries with keys, and probabilities with values."""
        return 4 * self._attention_width * size.num_contexts


@cache
def matrix_flops_per_s(device: torch.device, dtype: torch.dtype, num_threads: int) -> float:
    """Of a large product of matrices, the best of some: what an update could reach at most.

    Measured once a process. `num_threads` are torch's, on which it depends.
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
