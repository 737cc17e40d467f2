"""`openenv-pipe profile`: where the time of a few training steps goes, and what to change.

cli         the command's options and help
command     the steps that are measured, as a table
recorder    what threads and coroutines do at regular moments, and what that is for
advice      which keys to change
"""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="profile",
    commands=(Command(name="profile", target="openenv_pipe.extras.profile.cli:profile"),),
)
