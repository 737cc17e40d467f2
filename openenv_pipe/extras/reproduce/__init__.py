"""`openenv-pipe reproduce`: run a run again and compare the two.

cli          the command's options and help
api          `openenv_pipe.reproduce`
command      what is rejected, what is run, the verdict
replaying    training from recorded episodes, without environment and engine
recording    a run folder without weights, small enough for version control
comparing    the first difference between two folders
bands        tolerances for runs whose sampler is not exact
"""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="reproduce",
    commands=(Command(name="reproduce", target="openenv_pipe.extras.reproduce.cli:reproduce"),),
    functions=("openenv_pipe.extras.reproduce.api:reproduce",),
)
