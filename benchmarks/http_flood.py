"""Measure what clients without a key cost a server: its memory, and the time of another client.

    python benchmarks/http_flood.py [--connections 1000] [--bodies 100] [--mib 64] [OVERRIDES]

Starts `serve --train` with a tiny model, and sends it what needs no key: connections whose bodies
and headers are never finished, and whole bodies of the largest size. Meanwhile another client
sends requests, each on a connection of its own. Prints the growth of the server's memory and
the longest wait of that client, and exits with 1 if they are over the limits.
"""

import argparse
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import psutil

MIB = 2**20
MAX_GROWTH_MIB = 100
MAX_WAIT_S = 1.0
START_LIMIT_S = 120.0
HELD_S = 5.0  # how long unfinished connections are held
SENT_AT_ONCE = 200_000  # bytes of a body that is never finished
TOKEN = "a-token-of-the-benchmark"


def request(path: str, length: int) -> bytes:
    """Return the head of a request whose body has `length` bytes."""
    lines = (f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {length}", "", "")
    return "\r\n".join(lines).encode()


def ask(port: int, data: bytes, limit_s: float = 30.0) -> bytes:
    """Send a request, as much of it as the server takes, and return the beginning of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=limit_s) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        with suppress(ConnectionResetError):
            return connection.recv(64)
    return b""


def unfinished(port: int, number: int) -> socket.socket | None:
    """Open a connection whose headers, or whose body, are never finished."""
    try:
        connection = socket.create_connection(("127.0.0.1", port), timeout=10.0)
    except OSError:
        return None
    with suppress(OSError):
        if number % 4:
            connection.sendall(request("/v1/chat/completions", 64 * MIB - 1))
            connection.settimeout(0.05)
            connection.sendall(b'"' + b"a" * SENT_AT_ONCE)
        else:
            connection.sendall(request("/rollouts", 2)[:-2])
    return connection


class Watch:
    """Looks at the server while it is attacked."""

    def __init__(self, port: int, process: psutil.Process) -> None:
        self._port = port
        self._process = process
        self.start_mib = self.peak_mib = self._memory_mib()
        self.longest_s = 0.0
        self.failures = 0

    def _memory_mib(self) -> float:
        return self._process.memory_info().rss / MIB

    @contextmanager
    def watching(self) -> Iterator[None]:
        ended = threading.Event()
        threads = [
            threading.Thread(target=each, args=(ended,)) for each in (self._ask, self._weigh)
        ]
        for each in threads:
            each.start()
        try:
            yield
        finally:
            ended.set()
            for each in threads:
                each.join()

    def _ask(self, ended: threading.Event) -> None:
        lines = ("GET /v1/models HTTP/1.1", "Host: 127.0.0.1", "Connection: close", "", "")
        head = "\r\n".join(lines).encode()
        while not ended.wait(0.05):
            start = time.monotonic()
            try:
                self.failures += not ask(self._port, head).startswith(b"HTTP/1.1 ")
            except OSError:
                self.failures += 1
            self.longest_s = max(self.longest_s, time.monotonic() - start)

    def _weigh(self, ended: threading.Event) -> None:
        while not ended.wait(0.02):
            self.peak_mib = max(self.peak_mib, self._memory_mib())


@contextmanager
def training_server(overrides: list[str]) -> Iterator[tuple[int, psutil.Process]]:
    """Run a server, and yield its port and its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "openenv_pipe.cli.main", "serve", "--train", "conf=client"]
        command += ["--port", str(port), "model=tiny", f"runs_dir={folder}", *overrides]
        with subprocess.Popen(command, env={**os.environ, "OPENENV_PIPE_TOKEN": TOKEN}) as server:
            try:
                _wait_for(port, server)
                yield port, psutil.Process(server.pid)
            finally:
                server.terminate()
                server.wait(60.0)


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            time.sleep(2.0)  # until the run waits for its clients
            return
        time.sleep(0.2)
    sys.exit("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--bodies", type=int, default=100)
    parser.add_argument("--mib", type=int, default=64)
    options, overrides = parser.parse_known_args()
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(allowed, 65536), allowed))
    items = b"[" + b"[]," * ((options.mib * MIB - 1024) // 3) + b"[]]"
    body = request("/rollouts", len(items)) + items
    with training_server(overrides) as (port, process):
        watch = Watch(port, process)
        with watch.watching(), ThreadPoolExecutor(8) as threads:
            held = list(
                threads.map(lambda each: unfinished(port, each), range(options.connections))
            )
            time.sleep(HELD_S)
            print(f"unfinished: {watch.peak_mib - watch.start_mib:.0f} MiB", flush=True)
            print(f"            {watch.longest_s:.2f} s", flush=True)
            for each in held:
                if each is not None:
                    each.close()
            list(threads.map(lambda _: ask(port, body, 120.0), range(options.bodies)))
        growth = watch.peak_mib - watch.start_mib
        print(f"growth of the server's memory: {growth:.0f} MiB (limit {MAX_GROWTH_MIB})")
        print(f"longest wait of another client: {watch.longest_s:.2f} s (limit {MAX_WAIT_S:g})")
        print(f"failures of another client: {watch.failures}")
    sys.exit(growth > MAX_GROWTH_MIB or watch.longest_s > MAX_WAIT_S or watch.failures > 0)


if __name__ == "__main__":
    main()
