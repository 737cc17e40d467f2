"""What a command hands to a run: progress, a stop request made by signals, and its command line.

The first Ctrl-C, SIGTERM or SIGHUP saves and ends the work, and a second signal ends it at once. A
closed terminal sends SIGHUP, perhaps several times, so SIGHUP never counts as a second signal.
"""

import asyncio
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from openenv_pipe.cli.progress import build_progress
from openenv_pipe.cli.streams import is_live
from openenv_pipe.system.process_settings import collect_as_usual
from openenv_pipe.system.stop_request import StopRequest
from openenv_pipe.system.untrusted_text import for_people

if TYPE_CHECKING:
    from openenv_pipe.pipeline import RunControl

SHOW_CURSOR = "\x1b[?25h"


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
    return ["openenv-pipe", *sys.argv[1:]]


def stop_signals() -> list[int]:
    """Return the signals that ask the work to save and end, without a SIGHUP that nohup ignores."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


class SignalStop(StopRequest):
    """A stop request that `stop_signals` make while the work runs."""

    def __init__(self, note: Callable[[str], None]) -> None:
        """note: prints a line to the user."""
        super().__init__()
        self.received: int | None = None  # the number of the first signal
        self._num_signals = 0
        self._note = note

    @contextmanager
    def exit_code(self) -> Iterator[None]:
        """Exit with 128 + N where signal N has ended the work in this block."""
        try:
            yield
        except KeyboardInterrupt:
            if self.received is None:
                raise
            raise SystemExit(128 + self.received) from None

    @contextmanager
    def accepting(self, cancel: Callable[[], object]) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._receive, number)
            signal.signal(number, self._count)  # The loop gets the signal all the same.
        with super().accepting(cancel):
            yield

    def _count(self, number: int, _: FrameType | None) -> None:
        """End the process at the second signal, even while the event loop is busy.

        Only steps after the last checkpoint are lost then: files are written whole or not at all,
        and guardian processes end the servers.
        """
        self._num_signals += 1
        if self._num_signals > 1 and number != signal.SIGHUP:
            with suppress(OSError, ValueError):  # stderr is closed
                self._say_farewell(sys.stderr.fileno())
            os._exit(128 + number)

    def _say_farewell(self, descriptor: int) -> None:
        """Write the farewell, and show the terminal's cursor again, if that needs no waiting."""
        cursor = SHOW_CURSOR if is_live(sys.stderr) else ""
        farewell = f"{for_people(self.farewell)}\n" if self.farewell else ""
        if select.select([], [descriptor], [], 0)[1]:
            os.write(descriptor, (cursor + farewell).encode(errors="replace"))

    def _receive(self, number: int) -> None:
        """Stop the work. The event loop calls this, so that it interrupts no other code."""
        if self.is_made and number == signal.SIGHUP:
            return
        self.received = number
        self._note("stopping and saving; repeat to stop without saving")
        self.make()
