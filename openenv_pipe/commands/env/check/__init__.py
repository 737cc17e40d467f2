"""`openenv-pipe env check`: what an environment does, measured by playing it."""

from openenv_pipe.commands.env.check.check import check_environment

__all__ = ["check_environment"]
