"""The commands of `openenv-pipe judge`: measure a judge, and score recorded episodes again."""

from openenv_pipe.commands.judge.check import Limits, check_judge
from openenv_pipe.commands.judge.score import Rescored, score_step
from openenv_pipe.commands.judge.subject import Recorded, find_recorded

__all__ = ["Limits", "Recorded", "Rescored", "check_judge", "find_recorded", "score_step"]
