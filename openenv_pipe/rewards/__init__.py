"""Named, weighted terms over an episode."""

from openenv_pipe.rewards.scoring import Scorer, open_scorer

__all__ = ["Scorer", "open_scorer"]
