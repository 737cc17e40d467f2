"""Sampling on a CPU in fewer and faster operations than transformers' modules take."""

from openenv_pipe.registry import Extra

EXTRA = Extra(
    name="cpu_sampling",
    fast_sampling="openenv_pipe.extras.cpu_sampling.sampling:CpuSampling",
)
