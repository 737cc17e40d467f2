"""Play and score episodes: one from its reset to its end, and many at once."""

from openenv_pipe.rollout.collector import collect_groups, play_groups
from openenv_pipe.rollout.context import RolloutContext

__all__ = ["RolloutContext", "collect_groups", "play_groups"]
