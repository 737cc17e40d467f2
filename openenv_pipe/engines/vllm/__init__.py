"""Engine `vllm`: a server in an environment of its own, sampled over HTTP, token ids in and out."""

from openenv_pipe.engines.vllm.opening import Source, open_engine
from openenv_pipe.engines.vllm.sleeping import Neighbour

__all__ = ["Neighbour", "Source", "open_engine"]
