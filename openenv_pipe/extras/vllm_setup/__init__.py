"""`openenv-pipe engine`: install vLLM, and start its servers by hand.

cli      the commands' options and help
install  vLLM in an environment of its own, by locks/
command  how to start the servers that a run with engine.launch=attach needs
"""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(
    name="vllm_setup",
    commands=(Command(name="engine", target="openenv_pipe.extras.vllm_setup.cli:app"),),
)
