"""`openenv-pipe rescore`: score the recorded episodes of a run with another reward.

api      `openenv_pipe.rescore`
cli      the command's options and help
rescore  asks the reward's terms again, writes the episodes beside the run, says what has changed
"""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="rescore",
    commands=(Command(name="rescore", target="openenv_pipe.extras.rescore.cli:rescore"),),
    functions=("openenv_pipe.extras.rescore.api:rescore",),
)
