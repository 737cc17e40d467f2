"""What `Sampler.FAST` is on a CPU."""

from typing import Any

import torch

from openenv_pipe.extras.cpu_sampling.fast_forward import FastForward
from openenv_pipe.extras.cpu_sampling.packed_decoder import PackedDecoder, unsupported_reason
from openenv_pipe.models.forward.row_forward import FastSampling, RowForward


class CpuSampling(FastSampling):
    """Passes over one copy of the weights."""

    def unsupported_reason(self, model: Any, decoder: Any) -> str | None:
        return unsupported_reason(model, decoder)

    def forwards(
        self, decoder: Any, head: Any, precision: torch.dtype, num: int
    ) -> list[RowForward]:
        weights = PackedDecoder(decoder, head, precision)
        return [FastForward(weights) for _ in range(num)]
