"""`openenv-pipe reproduce`: run a run again and compare the two.

command      the command: what is rejected, what is run, the verdict
replaying    training from recorded episodes, without environment and engine
recording    a run folder without weights, small enough for version control
comparing    the first difference between two folders
bands        tolerances for runs whose sampler is not exact
"""

from openenv_pipe.commands.reproduce.command import Reproduction, reproduce
from openenv_pipe.commands.reproduce.recording import record

__all__ = ["Reproduction", "record", "reproduce"]
