"""`openenv-pipe env`: find, write, play, check and inspect environments.

cli                      options and help
targets                  what a command is about, and one running server of it
episodes                 episodes whose actions a function chooses, or chance
inspect                  `env inspect`: a block and an experiment, from what a trial measures
chat_prompts             the adapter's keys in that block, and what a model that reads is told
check/                   `env check`: probes by playing
play                     `env play`: a person in the model's place
find                     `env find`: what is installed, and what a catalog names
scaffold/                `env new`: a copy of a small environment
"""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(name="lab", commands=(Command(name="env", target="openenv_pipe.extras.lab.cli:app"),))
