"""Runs, from their configuration to their report. docs/architecture.md lists the modules."""

from openenv_pipe.pipeline.callbacks import Callback
from openenv_pipe.pipeline.run import RunControl
from openenv_pipe.pipeline.start import begin, fork, resume, train

__all__ = ["Callback", "RunControl", "begin", "fork", "resume", "train"]
