"""What another user of the machine can do at the ports of a run, and to its files in shared places:
nothing."""

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

from tests.commands import SMALL, Command, wait_until
from tests.ports import lasting_port
from tests.vllm_runs import LIMIT_S as START_LIMIT_S
from tests.vllm_server import installed_vllm

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = 65534
ANSWERS = {401, 403, 404, 426, None}  # None: no HTTP, or closed
LIMIT_S = 5.0
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


MEMORY = Path("/dev/shm")
STEPS = "runs/echo/*/metrics.jsonl"  # has something when the run trains
WAITING = "agent.command=['{python}','-c','import time; time.sleep(3600)']"
ECHO = ("conf=echo", "trainer.steps=10000", *SMALL)
PORT = lasting_port()
# The arguments of a command, and the pattern of the files that show that it is at work.
KINDS = {
    "one device": (("train", *ECHO), STEPS),
    "two devices": (("train", *ECHO, "trainer.devices=2"), STEPS),
    "a program": (
        ("train", *ECHO, "agent=program", WAITING, "agent.timeout_s=3600"),
        "runs/echo/*/logs/attempt_1/programs/*",
    ),
    "serve": (("serve", "echo/0001", "--engine", "local", "--port", str(PORT)), ""),
    "vllm": (("train", *ECHO, "engine=vllm", "engine.arguments=[--enforce-eager]"), STEPS),
}
TRAINED = ("trainer.steps=1", "trainer.checkpoint.every=1", "eval.num_tasks=2")


@contextmanager
def shared_places() -> Iterator[Path]:
    """Yield the folder of temporary and runtime files of commands, which everybody may use."""
    # Its path is short, as that of /tmp: sockets are elsewhere if it is long.
    with tempfile.TemporaryDirectory(dir="/tmp") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        folder.chmod(0o1777)
        for variable in ("TMPDIR", "XDG_RUNTIME_DIR"):
            patch.setenv(variable, name)
        yield folder


@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=[pytest.mark.vllm] if each == "vllm" else []) for each in KINDS],
)
def test_another_user_gets_nothing_of_a_run(kind, tmp_path):
    if kind == "vllm" and isinstance(found := installed_vllm(), str):
        pytest.skip(found)
    arguments, pattern = KINDS[kind]
    with shared_places() as shared:
        if kind == "serve":
            first = Command(tmp_path, "train", *ECHO, *TRAINED)
            assert first.wait() == 0, first.err
        run = Command(tmp_path, *arguments)

        def is_at_work():
            if not pattern:
                return PORT in listening(run.pid)
            return any(each.stat().st_size for each in tmp_path.glob(pattern))

        try:
            wait_until(is_at_work, "the first step", run, START_LIMIT_S)
            ports, sockets = listening(run.pid), unix_sockets(run.pid)
            files = {*shared.rglob("*"), *in_shared_memory(run.pid)}
            files |= {Path(each) for each in sockets if each.startswith("/")}
            answers = as_nobody(lambda: answers_at(sorted(ports)))
            successes = as_nobody(lambda: successes_with(sorted(files)))
        finally:
            run.send_signal(signal.SIGINT)
            run.wait()
    assert ports, "a run has the port of its environment at least"
    assert set(ports.values()) <= {"127.0.0.1"}
    assert len(answers) == len(ports) * len(REQUESTS)
    assert {text: status for text, status in answers.items() if status not in ANSWERS} == {}
    assert 401 in answers.values()
    assert successes == []
    assert [each for each in sockets if not each.startswith("/")] == [], "no folder protects these"
