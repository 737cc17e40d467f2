"""What functions of the Python API share: names of runs, progress, and a thread for the work."""

import contextvars
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from openenv_pipe.errors import PipeError
from openenv_pipe.runs.run import Run
from openenv_pipe.system.library_defaults import set_library_defaults
from openenv_pipe.system.secrets import redact

if TYPE_CHECKING:  # these import torch
    from openenv_pipe.pipeline import Callback, RunControl

Result = TypeVar("Result")
RunName = Run | str | os.PathLike[str]

set_library_defaults()  # before one of the API's functions imports torch


def run_name(run: RunName) -> str:
    """Return a run as commands take it: its folder, or the word that was given for it."""
    return str(run.path) if isinstance(run, Run) else os.fspath(run)


def run_control(
    on_progress: Callable[[str], object] | None, callbacks: Sequence["Callback"] = ()
) -> "RunControl":
    """Return the control of one run. Without `on_progress`, lines of progress go to the log."""
    from openenv_pipe.pipeline import RunControl
    from openenv_pipe.system.progress import LineProgress

    if on_progress is None:
        return RunControl(callbacks=callbacks)
    return RunControl(progress=LineProgress(on_progress), callbacks=callbacks)


def in_thread(work: Callable[[], Result], control: "RunControl") -> Result:
    """Do the work in a new thread and wait, because the caller's may run an event loop.

    Raises KeyboardInterrupt after the work where it was interrupted, also if it came too late to
    stop anything.
    """
    interrupt: KeyboardInterrupt | None = None
    with ThreadPoolExecutor(1, "openenv_pipe") as executor:
        future = executor.submit(contextvars.copy_context().run, work)
        while True:
            try:
                result = future.result()
                break
            except KeyboardInterrupt as error:
                if future.done():
                    raise
                interrupt = error
                control.stop.make()
            except PipeError as error:
                error.args = (redact(str(error)),)  # a notebook is a file too
                raise
    if interrupt is not None:
        raise interrupt
    return result
