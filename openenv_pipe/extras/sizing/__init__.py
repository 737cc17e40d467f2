"""`openenv-pipe plan`: what a number of GPUs gives for a configuration, on paper."""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="sizing",
    commands=(Command(name="plan", target="openenv_pipe.extras.sizing.cli:plan"),),
)
