"""What a command hands to a run: its progress, its stop by signals, and its own words."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from openenv_pipe.cli.progress import build_progress
from openenv_pipe.cli.signals import SignalStop
from openenv_pipe.system.garbage import collect_as_usual

if TYPE_CHECKING:
    from openenv_pipe.pipeline import RunControl


@contextmanager
def controlled() -> "Iterator[RunControl]":
    """Show progress on the terminal; a signal stops the run and sets the exit code."""
    progress = build_progress()
    try:
        with progress.phase("loading the libraries"):
            from openenv_pipe.pipeline import RunControl
        collect_as_usual()
        stop = SignalStop(progress.note)
        with stop.exit_code():
            yield RunControl(progress=progress, stop=stop)
    finally:
        progress.close()


def command_line() -> list[str]:
    """Return the command line, which the run folder records."""
    return ["openenv-pipe", *sys.argv[1:]]
