"""`openenv-pipe plan`: what a number of GPUs gives for a configuration, on paper.

cli          the command's arguments and help
constants    the GPUs, and what is measured, published or assumed of them and of servers
shapes       the dimensions of a model that is not loaded
estimate     the plan: memory, time and the bottleneck
text         its tables
"""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="sizing", commands=(Command(name="plan", target="openenv_pipe.extras.sizing.cli:plan"),)
)
