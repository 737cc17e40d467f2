"""`openenv-pipe profile`: where the time of a few training steps goes, and what to change.

cli         the command's options and help
command     the steps that are measured
recorder    what threads and coroutines do at regular moments
activities  what that is for
advice      which keys to change
text        a profile as a table
"""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="profile",
    commands=(Command(name="profile", target="openenv_pipe.extras.profile.cli:profile"),),
)
