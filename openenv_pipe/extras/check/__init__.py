"""`openenv-pipe check`: tries what a run needs, says what it found, and leaves nothing behind."""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="check", commands=(Command(name="check", target="openenv_pipe.extras.check.cli:check"),)
)
