"""`openenv-pipe export`: a checkpoint as a Hugging Face folder, with its adapter merged."""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="export",
    commands=(Command(name="export", target="openenv_pipe.extras.export.cli:export"),),
    functions=("openenv_pipe.extras.export.api:export",),
)
