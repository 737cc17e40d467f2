"""`openenv-pipe rescore`: score the recorded episodes of a run with another reward.

api      `openenv_pipe.rescore`
cli      the command's options and help
rescore  reads the episodes, asks the reward's terms, and writes the episodes beside the run
changes  what has changed: means by term, and how far the two rewards agree
"""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="rescore",
    commands=(Command(name="rescore", target="openenv_pipe.extras.rescore.cli:rescore"),),
    functions=("openenv_pipe.extras.rescore.api:rescore",),
)
