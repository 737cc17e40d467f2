"""Measure what clients without a key cost a server: its memory, and the time of another client.

    python benchmarks/http_flood.py SURFACE [--connections 1000] [--bodies 100] [--mib 64]

Starts one of our servers with a tiny model, and sends it what needs no key: connections whose
bodies and headers are never finished, and whole bodies of the largest size. Meanwhile another
client sends requests, each on a connection of its own. Prints the growth of the server's memory and
the longest wait of that client, and exits with 1 if they are over the limits. `SURFACES` lists the
servers; `vllm` needs `openenv-pipe engine install vllm`.
"""

import argparse
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

MIB = 2**20
MAX_GROWTH_MIB = 100
MAX_WAIT_S = 1.0
START_LIMIT_S = 600.0
SETTLING_S = 3.0  # until the memory of a server that has just started is steady
HELD_S = 5.0  # how long unfinished connections are held
SENT_AT_ONCE = 200_000  # bytes of a header, or of a body, that is never finished
TOKEN = "a-token-of-the-benchmark"
PIPE = (sys.executable, "-m", "openenv_pipe.cli.main")
LISTING = (
    b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"  # without a key
)


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
    begun = request("/v1/chat/completions", 64 * MIB - 1)
    endless = b"a" * SENT_AT_ONCE
    sent = (begun[:-2], begun[:-2] + b"x: " + endless, begun + b'"' + endless)
    with suppress(OSError):
        connection.settimeout(0.05)
        connection.sendall(sent[number % len(sent)])
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
        while not ended.wait(0.05):
            start = time.monotonic()
            try:
                self.failures += not ask(self._port, LISTING).startswith(b"HTTP/1.1 ")
            except OSError:
                self.failures += 1
            self.longest_s = max(self.longest_s, time.monotonic() - start)

    def _weigh(self, ended: threading.Event) -> None:
        while not ended.wait(0.02):
            self.peak_mib = max(self.peak_mib, self._memory_mib())


@dataclass(frozen=True, kw_only=True, slots=True)
class Surface:
    """How a server is started and found."""

    command: tuple[str, ...]  # PORT stands for a free port
    trains_first: bool = False  # the command names a run, RUN
    is_child: bool = False  # another process than the command's own listens


TINY = ("model=tiny", "device=cpu", "num_threads=1")
# It plays until the end: the only step of the run waits for it.
PROGRAM = "agent.command=['{python}','-c','import time; time.sleep(3600)']"
SURFACES = {
    "train": Surface(command=("serve", "--train", "conf=client", "--port", "PORT", *TINY)),
    "program": Surface(
        command=(
            *("train", "conf=echo", "agent=program", PROGRAM, "agent.timeout_s=3600"),
            *("eval.baselines=false", "eval.num_tasks=2", "host.sessions_per_server=4", *TINY),
        )
    ),
    "local": Surface(
        command=("serve", "RUN", "--engine", "local", "--port", "PORT"), trains_first=True
    ),
    "vllm": Surface(
        command=("serve", "RUN", "--engine", "vllm", "--port", "PORT", "--", "--enforce-eager"),
        trains_first=True,
        is_child=True,
    ),
    "view": Surface(command=("view", "RUN", "--port", "PORT"), trains_first=True),
    "environment": Surface(
        command=("train", "conf=echo", "trainer.steps=1000000", *TINY), is_child=True
    ),
}


@contextmanager
def running(surface: Surface) -> Iterator[tuple[int, psutil.Process]]:
    """Run a server, and yield its port and its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        if surface.trains_first:
            short = ("trainer.steps=1", "trainer.checkpoint.every=1", "eval.num_tasks=2")
            subprocess.run([*PIPE, "train", "conf=echo", *short, *TINY], cwd=folder, check=True)
        known = {"PORT": port, "RUN": "echo/0001"}
        command = [*PIPE, *(known.get(word, word) for word in surface.command)]
        variables = {**os.environ, "OPENENV_PIPE_TOKEN": TOKEN, "VLLM_API_KEY": TOKEN}
        with subprocess.Popen(command, cwd=folder, env=variables) as server:
            try:
                yield _listening(server, surface)
            finally:
                server.send_signal(signal.SIGINT)
                server.wait(60.0)


def _listening(server: subprocess.Popen[bytes], surface: Surface) -> tuple[int, psutil.Process]:
    """Wait until the server answers, and return its port and its process."""
    own = psutil.Process(server.pid)
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and server.poll() is None:
        time.sleep(0.5)
        for process in own.children(recursive=True) if surface.is_child else [own]:
            with suppress(OSError, psutil.Error):
                for each in process.net_connections("tcp4"):
                    if each.status != psutil.CONN_LISTEN:
                        continue
                    if ask(each.laddr.port, LISTING, 5.0).startswith(b"HTTP/1.1 "):
                        time.sleep(SETTLING_S)
                        return each.laddr.port, process
    sys.exit("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("surface", choices=SURFACES)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--bodies", type=int, default=100)
    parser.add_argument("--mib", type=int, default=64)
    options = parser.parse_args()
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(allowed, 65536), allowed))
    items = b"[" + b"[]," * ((options.mib * MIB - 1024) // 3) + b"[]]"
    body = request("/rollouts", len(items)) + items
    with running(SURFACES[options.surface]) as (port, process):
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
