"""`openenv-pipe engine`: install vLLM, and start its servers by hand."""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="vllm_setup",
    commands=(Command(name="engine", target="openenv_pipe.extras.vllm_setup.cli:app"),),
)
