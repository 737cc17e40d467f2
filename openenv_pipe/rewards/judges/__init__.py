"""Reward terms that a judge decides: a model that reads episodes."""

from openenv_pipe.rewards.judges.criteria import CriteriaTerm
from openenv_pipe.rewards.judges.judge import Judge, open_judge
from openenv_pipe.rewards.judges.ruler import Ruler

__all__ = ["CriteriaTerm", "Judge", "Ruler", "open_judge"]
