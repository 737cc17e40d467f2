"""Error messages about keys and losses by the names that TRL, verl, prime-rl and ART have."""

from openenv_pipe.registry import Extra

EXTRA = Extra(name="coming_from", other_names="openenv_pipe.extras.coming_from.advice:advice")
