"""Named, weighted terms over an episode."""

from openenv_pipe.rewards.terms import Scorer

__all__ = ["Scorer"]
