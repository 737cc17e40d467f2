"""Play and score episodes: one from its reset to its end, and many at once."""

from openenv_pipe.rollout.collector import (
    accept_groups,
    collect_groups,
    deaths_of_servers,
    play_groups,
)
from openenv_pipe.rollout.context import RolloutContext

__all__ = ["RolloutContext", "accept_groups", "collect_groups", "deaths_of_servers", "play_groups"]
