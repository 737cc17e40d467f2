"""`openenv-pipe plan`: what a number of GPUs gives for a configuration, on paper.

cli          the command's arguments and help
cluster      the GPUs, and the words that describe them
constants    what is measured, published or assumed of GPUs and servers
shapes       the dimensions of a model that is not loaded
estimate     the plan: memory, time and the bottleneck
text         its tables
"""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="sizing",
    commands=(Command(name="plan", target="openenv_pipe.extras.sizing.cli:plan"),),
)
