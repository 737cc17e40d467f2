"""The exceptions that all rooms share; a few rooms have subclasses of their own.

PipeError
├── UserError            the user's input is wrong: exit 2, never a traceback
│   ├── ConfigError          a wrong key, value, group or file of the configuration
│   │   ├── EngineMissingError   the engine is missing; on a terminal, cli/ offers to install it
│   │   └── RequestRejectedError  an endpoint rejects a request as it is
│   └── RunFolderError       a run folder that is missing, unreadable or not what was asked for
├── FailureError         a part of the pipeline failed: exit 1, with the log to read
│   ├── HostError            an environment server that did not start, or died for good
│   ├── EngineError          the engine cannot generate
│   ├── JudgeError           the judge failed too often, or its budget is spent
│   ├── OutOfMemoryError     the machine or its GPU has no memory left
│   └── TrainingError        the learner met a value it must not train on
│       └── RankLostError        a process of the learner is gone; a resumed run starts another
└── SessionError         one WebSocket to one environment failed: ends an episode, never a run
    ├── ServerFullError      the server has no free session (CAPACITY_REACHED)
    ├── StepRejectedError     the environment answered with an error frame; the session is usable
    ├── SessionTimeoutError  no answer within the message's time limit
    └── SessionClosedError   the connection was closed

`Interrupted` is the KeyboardInterrupt of the Python API, and not a PipeError.

A message says what was wrong, the value seen, the value expected, and the next action.
Bugs of the package are AssertionErrors and other exceptions, which keep their traceback.
"""

import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NoReturn

MAX_TAIL_BYTES = 2**16  # the end of a log that is searched for its last lines
NUM_LINES = 12  # of a log, in a message
MAX_LINE = 200  # characters of a line of a log
MARGIN = "  | "  # before each of its lines
EXCEPTION = re.compile(r"[\w.]*(Error|Exception)\b")


class PipeError(Exception):
    """Base of all errors whose message is for the user. `exit_code` is that of the process."""

    exit_code = 1
    whole_text: Path | None = None  # the file with the whole message, where it is shown cut

    def _render_traceback_(self) -> list[str]:
        """Return what notebooks show: the message only, as no line of this package is at fault."""
        return [f"{type(self).__name__}: {self}"]


class UserError(PipeError):
    """An error that the user can correct in the command or the YAML."""

    exit_code = 2


class Interrupted(KeyboardInterrupt):
    """A keyboard interrupt of the Python API, whose message says how to continue."""

    def _render_traceback_(self) -> list[str]:
        """Return what notebooks show: the message."""
        return [f"KeyboardInterrupt: {self}".removesuffix(": ")]


class ConfigError(UserError):
    """A configuration that does not compose, validate or fit together."""


class EngineMissingError(ConfigError):
    """The configuration needs an engine that is not installed. `build` is its missing build."""

    def __init__(self, message: str, build: Literal["cpu", "cuda"]) -> None:
        super().__init__(message)
        self.build = build


class RequestRejectedError(ConfigError):
    """An endpoint rejects a request, with the HTTP status `status`, and would reject it again."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class RunFolderError(UserError):
    """A run folder that is missing, unreadable, or not what the command needs."""


class FailureError(PipeError):
    """A part of the pipeline failed. The message shows the last lines of the file `log`.

    If the very last line is an exception, such as the one that ended a program, it comes first.
    """

    def __init__(self, message: str, log: Path | None = None) -> None:
        if log is not None:
            lines = last_lines(log)
            last = lines.rpartition("\n")[2].removeprefix(MARGIN)
            if EXCEPTION.match(last) and last not in message:
                message = f"{message}: {last}"
            message = f"{message} (log: {log}){lines}"
        super().__init__(message)
        self.log = log

    def _render_traceback_(self) -> list[str]:
        """Return the message, below the traceback of a cause that is no error of this package."""
        cause = self.__cause__
        is_of_others = cause is not None and not isinstance(cause, PipeError)
        return [
            *(traceback.format_exception(cause) if is_of_others else ()),
            *super()._render_traceback_(),
        ]


class HostError(FailureError):
    """An environment server did not become ready, or died more often than its budget allows."""


class EngineError(FailureError):
    """The engine cannot produce tokens."""


class JudgeError(FailureError):
    """The judge gave no verdict for too many episodes, or its budget is spent."""


class OutOfMemoryError(FailureError):
    """The machine or its GPU has no memory left. The advice depends on the stage of the run."""


class TrainingError(FailureError):
    """A loss or logprob that is not finite, or a sampler that disagrees with the trainer."""


class RankLostError(TrainingError):
    """A process of the learner has ended, or cannot be reached. A resumed run starts another."""


class SessionError(PipeError):
    """One session with one environment failed. The episode ends; the run goes on."""


class ServerFullError(SessionError):
    """The server has no free session (CAPACITY_REACHED)."""


class StepRejectedError(SessionError):
    """The environment answered with an error frame of code `code`; the session stays usable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class SessionTimeoutError(SessionError):
    """No answer within the time limit of the message."""


class SessionClosedError(SessionError):
    """The server closed the connection, or died."""


def raise_first(group: BaseExceptionGroup) -> NoReturn:
    """Raise the first error of a TaskGroup's exception group, with its own cause and context.

    The others are added as notes, so that a traceback shows them too.
    """
    first, *others = _members(group)
    for note in dict.fromkeys(f"at the same time: {type(e).__name__}: {e}" for e in others):
        first.add_note(note)
    context = first.__context__
    try:
        raise first
    finally:
        first.__context__ = context  # Python has just replaced it with the group


def _members(group: BaseExceptionGroup) -> Iterator[BaseException]:
    """Yield the errors of a group, including those of nested groups."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _members(error)
        else:
            yield error


def last_lines(log: Path, num_lines: int = NUM_LINES) -> str:
    """Return the end of a log file, indented; empty if the file cannot be read.

    Frames of Python's frozen modules are left out of tracebacks.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_TAIL_BYTES))
            text = file.read(MAX_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if '  File "<frozen ' not in line][-num_lines:]
    lines = [line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}..." for line in lines]
    return "".join(f"\n{MARGIN}{line}" for line in lines)
