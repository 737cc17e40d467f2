"""The child's half of the protocol: one JSON line asked, one answered. See `sandbox/box.py`.

Nothing here is trusted by the server: code that runs in this process can answer what it likes.
"""

import json
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from gate import FILE

REQUESTS, ANSWERS = 0, 1  # file descriptors
SUBMISSION = "submission"
PLAIN = (int, float, str, bool, type(None))


def receive() -> Any:
    """The next request; ends the process where there is none."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(REQUESTS, 65536)
        if not part:
            os._exit(0)
        line += part
    return json.loads(line)


def send(answer: dict[str, Any]) -> None:
    """Answer the last request."""
    text = memoryview(json.dumps(answer).encode() + b"\n")
    while text:
        text = text[os.write(ANSWERS, text) :]


def end(**answer: str) -> NoReturn:
    """Say what was attempted or exceeded, and end the process."""
    send(answer)
    os._exit(0)


def load(code: str, name: str) -> Callable[..., Any] | None:
    """Run the submission and answer how that went; None where it has no such function."""
    # A module among the others: dataclasses look theirs up.
    module = sys.modules[SUBMISSION] = ModuleType(SUBMISSION)
    try:
        exec(compile(code, FILE, "exec", dont_inherit=True), module.__dict__)
        function = module.__dict__.get(name)
        if not callable(function):
            raise NameError(f"no function {name} was defined")
    except BaseException as error:
        send({"error": describe(error)})
        return None
    send({"loaded": True})
    return function


def call(function: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    """`{"value": ...}`, or `{"error": [class, message]}`."""
    try:
        value = function(*arguments)
        require_plain(value)
        # A copy: a later call may change what this one returned.
        return {"value": json.loads(json.dumps(value, allow_nan=False))}
    except BaseException as error:
        return {"error": describe(error)}


def require_plain(value: Any) -> None:
    """Raise TypeError unless JSON carries the value unchanged; no subclass, no tuple, no set."""
    if type(value) is list:
        for item in value:
            require_plain(item)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"a key of the result is of type {type(key).__name__}, not str")
            require_plain(item)
    elif type(value) not in PLAIN:
        if type(value).__module__ == SUBMISSION:
            end(violation="a result of a class of the program's own")
        raise TypeError(f"the result is of type {type(value).__name__}, which is not allowed")


def describe(error: BaseException) -> list[str]:
    """Class and message; a SyntaxError says its line. SystemExit ends the process at once."""
    if isinstance(error, SystemExit):
        end(violation="an exit of the process")
    try:
        message = str(error)
    except BaseException:
        message = ""
    return [type(error).__name__, message]
