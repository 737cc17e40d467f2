"""Engine `vllm`: servers in a Python environment of their own, which take token ids over HTTP."""

from openenv_pipe.engines.vllm.build import open_engine
from openenv_pipe.engines.vllm.sleep_mode import LearnerFootprint

__all__ = ["LearnerFootprint", "open_engine"]
