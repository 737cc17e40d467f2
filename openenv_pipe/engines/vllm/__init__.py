"""Engine `vllm`: a server in an environment of its own, sampled over HTTP, token ids in and out."""

from openenv_pipe.engines.vllm.opening import Source, open_engine

__all__ = ["Source", "open_engine"]
