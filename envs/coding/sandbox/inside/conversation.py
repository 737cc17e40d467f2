"""The child's side of the protocol: one JSON line per request and answer. See `sandbox/box.py`.

The server trusts no answer, because the submission runs in this process and can forge any of them.
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
    """Return the next request; end the process if there is none."""
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
    """Report what was attempted or exceeded, and end the process."""
    send(answer)
    os._exit(0)


def load(code: str, name: str) -> Callable[..., Any] | None:
    """Run the submission, send the outcome, and return its function, or None if that failed."""
    # Register the module, because dataclasses look up their own module in `sys.modules`.
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
    """Return `{"value": ...}`, or `{"error": [class, message]}` if the call raised."""
    try:
        value = function(*arguments)
        require_plain(value)
        # Copy the value, because a later call may change it.
        return {"value": json.loads(json.dumps(value, allow_nan=False))}
    except BaseException as error:
        return {"error": describe(error)}


def require_plain(value: Any) -> None:
    """Raise TypeError unless JSON keeps the value unchanged: no subclass, no tuple, no set."""
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
    """Return class and message, with the line of a SyntaxError. SystemExit ends the process."""
    if isinstance(error, SystemExit):
        end(violation="an exit of the process")
    try:
        message = str(error)
    except BaseException:
        message = ""
    return [type(error).__name__, message]
