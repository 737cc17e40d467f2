"""`openenv-pipe profile`: where the time of a few training steps goes, and what to change."""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="profile",
    commands=(Command(name="profile", target="openenv_pipe.extras.profile.cli:profile"),),
)
