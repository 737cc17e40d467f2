"""Environment servers, programs and vLLM servers in containers, by Docker or Kubernetes."""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="containers",
    commands=(
        Command(name="hosts", target="openenv_pipe.extras.containers.cli:hosts"),
        Command(name="prune", target="openenv_pipe.extras.containers.cli:prune"),
    ),
)
