"""`openenv-pipe lr`: try some learning rates for a few steps each, and choose one."""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="learning_rate",
    commands=(Command(name="lr", target="openenv_pipe.extras.learning_rate.cli:lr"),),
)
