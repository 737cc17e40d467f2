"""`openenv-pipe env`: find, write, play, check and inspect environments."""

from openenv_pipe.registry import Command, Extra

EXTRA = Extra(name="lab", commands=(Command(name="env", target="openenv_pipe.extras.lab.cli:app"),))
