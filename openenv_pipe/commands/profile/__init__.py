"""`openenv-pipe profile`: where the time of a few training steps goes, and what to change."""

from openenv_pipe.commands.profile.advice import advice
from openenv_pipe.commands.profile.command import Profiled, profile
from openenv_pipe.commands.profile.text import as_table, summary

__all__ = ["Profiled", "advice", "as_table", "profile", "summary"]
