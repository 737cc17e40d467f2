"""`openenv-pipe plugins`: what the installed plugins bring."""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="plugins",
    commands=(Command(name="plugins", target="openenv_pipe.extras.plugins.cli:plugins"),),
)
