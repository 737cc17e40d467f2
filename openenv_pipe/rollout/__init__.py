"""Playing episodes: the loop of one, and the gathering of many."""

from openenv_pipe.rollout.collector import Collector
from openenv_pipe.rollout.episode import Chat

__all__ = ["Chat", "Collector"]
