"""What another user of the machine can do at the ports of a run: nothing."""

import json
import os
import signal
import socket
import time
from contextlib import suppress

import psutil
import pytest

from tests.commands import SMALL, Command, wait_until

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


def ask_as_nobody(ports: list[int]) -> dict[str, int | None]:
    """Send every request to every port in a fork that is another user."""
    theirs, ours = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            asked = {
                f"{number} at {port}: {request}": ask(port, *request)
                for port in ports
                for number, request in enumerate(REQUESTS)
            }
            until_s = time.monotonic() + LIMIT_S
            found = {text: status_of(connection, until_s) for text, connection in asked.items()}
            os.write(ours, json.dumps(found).encode())
        except BaseException as error:
            os.write(ours, f"{error!r}".encode())
        finally:
            os._exit(0)
    os.close(ours)
    with os.fdopen(theirs, "rb") as pipe:
        answers = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(answers)


RUNS = {
    "one device": (),
    "two devices": ("trainer.devices=2",),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("kind", RUNS)
def test_another_user_gets_nothing_at_any_port_of_a_run(kind, tmp_path):
    run = Command(tmp_path, "train", "conf=echo", "trainer.steps=10000", *SMALL, *RUNS[kind])

    def ready():
        metrics = list(tmp_path.glob("runs/echo/*/metrics.jsonl"))
        return any(path.stat().st_size for path in metrics)

    try:
        wait_until(ready, "the first step", run)
        ports = listening(run.pid)
        assert ports, "a run has the port of its environment at least"
        answers = ask_as_nobody(sorted(ports))
    finally:
        run.send_signal(signal.SIGINT)
        run.wait()
    assert set(ports.values()) <= {"127.0.0.1"}
    assert len(answers) == len(ports) * len(REQUESTS)
    assert {text: status for text, status in answers.items() if status not in ANSWERS} == {}
    assert 401 in answers.values()
