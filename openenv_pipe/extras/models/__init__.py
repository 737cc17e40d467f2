"""`openenv-pipe models`, and models that are made on this machine."""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="models",
    commands=(Command(name="models", target="openenv_pipe.extras.models.cli:models"),),
    made_model="openenv_pipe.extras.models.gguf:made_model",
)
