"""`openenv-pipe lr`: try some learning rates for a few steps each, and choose one.

cli      the command's options and help
request  which rates are tried, the configuration of each trial, and the trials as a table
trials   the runs of the trials, which a repeated command goes on with
choice   what the trials have measured, and the rate that follows from it
"""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="learning_rate",
    commands=(Command(name="lr", target="openenv_pipe.extras.learning_rate.cli:lr"),),
)
