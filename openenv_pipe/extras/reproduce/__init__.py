"""`openenv-pipe reproduce`: run a run again and compare the two."""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="reproduce",
    commands=(Command(name="reproduce", target="openenv_pipe.extras.reproduce.cli:reproduce"),),
    functions=("openenv_pipe.extras.reproduce.api:reproduce",),
)
