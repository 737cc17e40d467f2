"""`openenv-pipe rescore`: score the recorded episodes of a run with another reward."""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="rescore",
    commands=(Command(name="rescore", target="openenv_pipe.extras.rescore.cli:rescore"),),
    functions=("openenv_pipe.extras.rescore.api:rescore",),
)
