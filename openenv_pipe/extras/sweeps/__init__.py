"""Sweeps: many runs from one command line, one after another or in parallel."""

from openenv_pipe.registry import Extra

EXTRA = Extra(name="sweeps", multirun="openenv_pipe.extras.sweeps.cli:multirun")
