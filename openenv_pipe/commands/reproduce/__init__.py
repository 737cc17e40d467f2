"""The same run again, and whether it is the same: `openenv-pipe reproduce`.

command      what is run, what is refused first, what is said in the end
replaying    training from recorded episodes: no environment, no engine
recording    a run folder without weights, small enough for version control
comparing    two folders: the first thing that differs
bands        how far two runs may be apart where a sampler is not exact
"""

from openenv_pipe.commands.reproduce.command import reproduce
from openenv_pipe.commands.reproduce.recording import record

__all__ = ["record", "reproduce"]
