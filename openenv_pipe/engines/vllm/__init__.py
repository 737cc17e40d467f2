"""Engine `vllm`: a server in an environment of its own, sampled over HTTP, token ids in and out."""

from openenv_pipe.engines.vllm.build import Source, open_engine
from openenv_pipe.engines.vllm.sleep_mode import LearnerFootprint

__all__ = ["LearnerFootprint", "Source", "open_engine"]
