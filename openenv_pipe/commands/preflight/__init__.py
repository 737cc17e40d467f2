"""`openenv-pipe check`: tries what a run needs, says what it found, and leaves nothing behind."""

from openenv_pipe.commands.preflight.checks import run_checks

__all__ = ["run_checks"]
