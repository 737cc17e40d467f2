"""The part of the sandbox in Python: the modules that can be imported, and reports of violations.

This part gives good error messages and the penalty, not safety: code can circumvent any check in
its own process. The system call filter stops it.
"""

import sys
from collections.abc import Callable

_MODULES = """
    __future__ abc array bisect builtins calendar collections contextlib copy dataclasses
    datetime decimal enum fractions functools heapq itertools json math numbers operator os random
    re statistics string sys textwrap time types typing unicodedata
"""
MODULES = frozenset(_MODULES.split())
LOADED_WITH = {"datetime": "_strptime", "time": "_strptime"}  # These are imported at first use.
# No function needs these modules to compute its result; `coding` contains the hidden tests.
_HOSTILE_MODULES = """
    _ctypes _posixsubprocess _socket _thread coding ctypes faulthandler fcntl gc mmap
    multiprocessing pty resource shutil signal socket ssl subprocess tempfile threading
"""
HOSTILE_MODULES = frozenset(_HOSTILE_MODULES.split())
HOSTILE_EVENTS = (
    *("_thread.", "code.__new__", "ctypes.", "fcntl.", "gc.", "mmap.", "open", "os.", "resource."),
    *("signal.", "socket.", "subprocess.", "sys._current_frames", "sys.addaudithook"),
)
FILE = "<submission>"
MAX_PRINTED = 100_000  # characters


class Sink:
    """The submission's standard output: characters are counted and discarded."""

    def __init__(self, overflow: Callable[[], None]) -> None:
        self._left = MAX_PRINTED
        self._overflow = overflow

    def write(self, text: str) -> int:
        self._left -= len(text)
        if self._left < 0:
            self._overflow()
        return len(text)

    def flush(self) -> None:
        """Do nothing, because no text is kept."""


class ClosedImports:
    """The only module finder; it finds nothing, so that no more modules can be imported."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in HOSTILE_MODULES:
            self._report(f"import of {name}")
        raise ModuleNotFoundError(f"{name} cannot be imported here", name=name)


def load_modules(code: str) -> None:
    """Import the allowed modules whose names the code mentions, before imports are closed."""
    words = "".join(sign if sign.isalnum() or sign == "_" else " " for sign in code).split()
    for name in MODULES.intersection(words):
        __import__(name)
        __import__(LOADED_WITH.get(name, name))


def close(report: Callable[[str], None], overflow: Callable[[], None]) -> None:
    """Close imports and streams, and report forbidden actions from now on.

    `report` takes the name of the action; neither it nor `overflow` returns.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] in HOSTILE_MODULES]:
        del sys.modules[name]
    sys.path.clear()
    sys.path_hooks.clear()
    sys.meta_path[:] = [ClosedImports(report)]
    sys.stdin = sys.__stdin__ = sys.stderr = sys.__stderr__ = None
    sys.stdout = sys.__stdout__ = Sink(overflow)
    sys.unraisablehook = lambda unraisable: None

    def watch(event: str, arguments: tuple) -> None:
        is_compiler = event == "open" and arguments[0] == FILE  # It reads a faulty line.
        if event.startswith(HOSTILE_EVENTS) and not is_compiler:
            report(event)

    sys.addaudithook(watch)
