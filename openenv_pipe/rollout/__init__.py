"""Playing episodes: the loop of one, and the gathering of many."""

from openenv_pipe.rollout.episode import Chat
from openenv_pipe.rollout.gather import Collector

__all__ = ["Chat", "Collector"]
