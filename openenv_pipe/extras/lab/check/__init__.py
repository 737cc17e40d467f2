"""`openenv-pipe env check`: probe an environment by playing it."""

from openenv_pipe.extras.lab.check.check import probe_environment

__all__ = ["probe_environment"]
