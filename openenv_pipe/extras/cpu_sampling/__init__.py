"""Sampling on a CPU in fewer and faster operations than transformers' modules take.

sampling        when `Sampler.FAST` is used
fast_forward    the forward pass
packed_decoder  the copy of the weights that it reads
row_attention   the keys and values of rows, and the attention to them
"""

from openenv_pipe.registry import Extra

EXTRA = Extra(
    name="cpu_sampling",
    fast_sampling="openenv_pipe.extras.cpu_sampling.sampling:CpuSampling",
)
