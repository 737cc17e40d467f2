"""The choice of fast tests, a virtual clock for tests of waits, and an end for tests that hang."""

import asyncio
import re
import signal
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT, ROOT / "tests", ROOT / "envs")  # where imports are looked for
# Those at the beginning of a line: others are of functions, or for type checkers alone.
IMPORT = re.compile(r"^(?:from|import) ([\w.]+)(?: import (\([^)]*\)|.*))?", re.MULTILINE)
NAME = re.compile(r"\w+")
HEAVY = {"torch", "transformers", "peft", "matplotlib"}  # each takes seconds to import


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that import heavy libraries where `-m "not slow"` chooses the fast tests."""
    is_file = collection_path.suffix == ".py"
    return (config.option.markexpr == "not slow" and is_file and _is_heavy(collection_path)) or None


def _is_heavy(path: Path) -> bool:
    """Return whether importing a file imports a heavy library."""
    known, waiting = {path}, [path]
    while waiting:
        names, files = _imports(waiting.pop())
        if names & HEAVY:
            return True
        waiting += files - known
        known |= files
    return False


@cache
def _imports(path: Path) -> tuple[set[str], set[Path]]:
    """Return the names that a file imports when it is imported, and the files of this project."""
    names: set[str] = set()
    for module, imported in IMPORT.findall(path.read_text(encoding="utf-8")):
        packages = module.split(".")
        for length in range(1, len(packages) + 1):
            package = ".".join(packages[:length])
            names |= {package, f"{package}.__init__"}
        names |= {f"{module}.{name}" for name in NAME.findall(imported)}
    files = {folder / f"{name.replace('.', '/')}.py" for name in names for folder in FOLDERS}
    return names, {file for file in files if file.is_file()}


@pytest.fixture
def no_hang(request):
    """Turn a test that takes longer than its module's LIMIT_S into a failure."""

    def give_up(*_):
        raise TimeoutError(f"not done after {request.module.LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(request.module.LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
async def virtual_time(monkeypatch):
    """Use a loop clock that stands still, and jumps to the next timer when nothing else is ready.

    It advances only when no task is ready, however busy the machine is.
    Tests that wait for a thread or another process cannot use it: their timeouts would pass at
    once.
    """
    loop = asyncio.get_running_loop()
    select, now_s = loop._selector.select, loop.time()

    def select_and_jump(timeout_s):
        nonlocal now_s
        if timeout_s is None:
            return select(None)
        events = select(0)
        if not events:
            now_s += timeout_s
        return events

    monkeypatch.setattr(loop, "time", lambda: now_s)
    monkeypatch.setattr(loop._selector, "select", select_and_jump)


@pytest.fixture
def other_user(tmp_path, monkeypatch):
    """A function that makes us another user, or the same one on another machine."""

    def change():
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other_state"))

    return change
