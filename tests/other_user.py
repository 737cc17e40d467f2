"""What another user of this machine, whom only root can become, gets of a run: nothing."""

import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

NOBODY = 65534
ANSWERS = {401, 403, 404, 426, None}  # None: no HTTP, or closed
LIMIT_S = 5.0
FORK_LIMIT_S = 300  # a fork of a process with threads may hang
MEMORY = Path("/dev/shm")
PATHS = ("/", "/health", "/docs", "/openapi.json", "/metadata", "/schema", "/web", "/state", "/mcp")
WEBSOCKET = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)
REQUESTS = [
    *(("GET", path, "") for path in PATHS),
    *(("POST", path, "Content-Length: 2\r\n") for path in ("/reset", "/step", "/mcp")),
    *(("GET", path, WEBSOCKET) for path in ("/ws", "/mcp")),
]


def listening(root: int) -> dict[int, str]:
    """Return the TCP ports at which a process and its descendants listen, with their addresses."""
    found = {}
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        try:
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr.port] = connection.laddr.ip
        except psutil.Error:
            continue
    return found


def ask(port: int, method: str, path: str, headers: str) -> socket.socket:
    """Send a request without any key."""
    connection = socket.socket()
    connection.settimeout(LIMIT_S)
    with suppress(OSError):  # the server has closed it already
        connection.connect(("127.0.0.1", port))
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{headers}\r\n"
        connection.sendall(head.encode() + (b"{}" if method == "POST" else b""))
    return connection


def status_of(connection: socket.socket, until_s: float) -> int | None:
    """Return the status of an answer, or None for what is no HTTP."""
    connection.settimeout(max(until_s - time.monotonic(), 0.01))
    try:
        words = connection.recv(100).split(b" ")
    except OSError:
        return None
    return int(words[1]) if words[0].startswith(b"HTTP/") else None


def as_nobody(work: Callable[[], object]) -> object:
    """Return what a function returns, in JSON, in a fork that is another user."""
    theirs, ours = os.pipe()
    if (pid := os.fork()) == 0:
        signal.alarm(FORK_LIMIT_S)
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            with os.fdopen(ours, "wb") as pipe:
                pipe.write(json.dumps(work()).encode())
        except BaseException as error:
            os.write(2, f"{error!r}".encode())
        finally:
            os._exit(0)
    os.close(ours)
    with os.fdopen(theirs, "rb") as pipe:
        found = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(found)


def answers_at(ports: list[int]) -> dict[str, int | None]:
    """Send every request to every port."""
    asked = {
        f"{number} at {port}: {request}": ask(port, *request)
        for port in ports
        for number, request in enumerate(REQUESTS)
    }
    until_s = time.monotonic() + LIMIT_S
    return {text: status_of(connection, until_s) for text, connection in asked.items()}


def successes_with(paths: list[Path]) -> list[str]:
    """Try to list, read, write, connect to, and replace each file; return what has succeeded."""
    found = []
    for path in paths:
        attempts: dict[str, Callable[[], object]] = {
            "listed": lambda path=path: [*path.iterdir()],
            "read": lambda path=path: path.open("rb").close(),
            "written": lambda path=path: path.open("ab").close(),
            "made in": lambda path=path: (path / "new").touch(),
            "renamed": lambda path=path: path.rename(path.with_name("moved")),
            "connected to": lambda path=path: socket.socket(socket.AF_UNIX).connect(str(path)),
        }
        for what, attempt in attempts.items():
            with suppress(OSError):
                attempt()
                found.append(f"{path} can be {what}")
    return found


def in_shared_memory(root: int) -> Iterator[Path]:
    """Yield what a process and its descendants have open or mapped in shared memory, and folders
    that this program makes there."""
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        with suppress(psutil.Error, OSError):
            opened = [Path(each.path) for each in process.memory_maps()]
            opened += [each.readlink() for each in Path(f"/proc/{process.pid}/fd").iterdir()]
            yield from (each for each in opened if each.is_relative_to(MEMORY) and each.exists())
    yield from MEMORY.glob("openenv*")


def unix_sockets(root: int) -> set[str]:
    """Return the addresses of unix sockets at which a process and its descendants listen."""
    found = set()
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        with suppress(psutil.Error):
            found |= {str(each.laddr) for each in process.net_connections("unix") if each.laddr}
    return found


@contextmanager
def shared_places() -> Iterator[Path]:
    """Yield the folder of temporary and runtime files of commands, which everybody may use."""
    # Its path is short, as that of /tmp: sockets are elsewhere if it is long.
    with tempfile.TemporaryDirectory(dir="/tmp") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        folder.chmod(0o1777)
        for variable in ("TMPDIR", "XDG_RUNTIME_DIR"):
            patch.setenv(variable, name)
        # torch makes a folder for compiled kernels, of which a run has none.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "torchinductor"))
        yield folder


def assert_nothing_for_others(root: int, shared: Path) -> None:
    """Assert that another user can use no port, socket or file of a process and its descendants.

    shared: where everybody may write, from `shared_places`.
    """
    ports, sockets = listening(root), unix_sockets(root)
    files = {*shared.rglob("*"), *in_shared_memory(root)}
    files |= {Path(each) for each in sockets if each.startswith("/")}
    answers = as_nobody(lambda: answers_at(sorted(ports)))
    assert ports, "a run has the port of its environment at least"
    assert set(ports.values()) <= {"127.0.0.1"}
    assert len(answers) == len(ports) * len(REQUESTS)
    assert {text: status for text, status in answers.items() if status not in ANSWERS} == {}
    assert 401 in answers.values()
    successes = as_nobody(lambda: successes_with(sorted(files)))
    assert successes == [], successes
    assert [each for each in sockets if not each.startswith("/")] == [], "no folder protects these"
