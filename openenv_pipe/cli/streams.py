"""stdout and stderr that survive a dead reader, a closed stream and a narrow encoding.

A run lasts for hours, and the reader of its output may be gone: `| head`, a terminal that was
closed, an ssh connection that broke. What nobody can read any more is dropped.
"""

import errno
import io
import os
import sys
from typing import Any, TextIO

# Write errors which mean that the reader is gone. Others, such as a full disk, are raised, because
# output that somebody asked for would be lost.
READER_IS_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ECONNRESET, errno.ESHUTDOWN)


class _Descriptor(io.FileIO):
    """A descriptor to write to, whose `is_lost` becomes True once nobody reads it."""

    def __init__(self, descriptor: int, *, drops_all: bool) -> None:
        """drops_all: drop what cannot be written, for whatever reason, as is right for progress."""
        super().__init__(descriptor, "wb", closefd=False)
        self.is_lost = False
        self._drops_all = drops_all

    def write(self, data: Any, /) -> int:
        if not self.is_lost:
            try:
                return super().write(data)
            except OSError as error:
                self.is_lost = True
                if not self._drops_all and error.errno not in READER_IS_GONE:
                    raise OSError(error.errno, error.strerror, "stdout") from error
        return len(data)


def keep_streams() -> None:
    """Replace this process's own stdout and stderr by such streams.

    Streams that others have put there already, as notebooks and test runners do, stay.
    """
    _open_standard_descriptors()
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _outliving(sys.stdout, 1, drops_all=False)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _outliving(sys.stderr, 2, drops_all=True)


def is_read(stream: TextIO) -> bool:
    """Return False once the reader of a stream of `keep_streams` is gone."""
    return not getattr(getattr(getattr(stream, "buffer", None), "raw", None), "is_lost", False)


def is_live(stream: TextIO) -> bool:
    """Return whether a stream is a terminal on which a line can change in place.

    A notebook's kernel gives its commands a terminal, and keeps each change as a line of output.
    """
    can_change = os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    return stream.isatty() and can_change and "JPY_PARENT_PID" not in os.environ


def _outliving(stream: TextIO | None, descriptor: int, *, drops_all: bool) -> TextIO:
    """Return a stream like the given one that writes what its encoding lacks as in \\u2013."""
    if stream is not None:
        stream.flush()
    raw = _Descriptor(descriptor, drops_all=drops_all)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding if stream is not None else "utf-8",
        errors="backslashreplace",
        line_buffering=stream is None or bool(stream.line_buffering),
    )


def _open_standard_descriptors() -> None:
    """Open closed ones to /dev/null; else a file could get their number, and so their output."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDWR)
