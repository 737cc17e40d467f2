"""Named, weighted terms over an episode."""

from openenv_pipe.rewards.scoring import Scorer

__all__ = ["Scorer"]
