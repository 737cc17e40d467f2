"""Error messages about keys and losses under their names in TRL, verl, prime-rl and ART."""

from openenv_pipe.registry import Extra

EXTRA = Extra(name="coming_from", other_names="openenv_pipe.extras.coming_from.advice:advice")
