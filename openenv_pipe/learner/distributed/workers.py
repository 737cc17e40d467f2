"""The processes of ranks 1 and up, as rank 0 holds them: started, told what to do, ended.

Each runs `worker.py` under a guardian. Orders go through a socket that only this user can reach,
and that ends with either side. Refused here: tensors, which the ranks send each other.
"""

import contextlib
import os
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from openenv_pipe.errors import ConfigError, PipeError, TrainingError
from openenv_pipe.learner.ranks import LONGEST_WAIT, Ranks
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.resources import PACKAGE_DIR

WORKER = "openenv_pipe.learner.distributed.worker"
START_LIMIT_S = 300.0  # until all have imported torch
EXIT_GRACE_S = 10.0  # for a rank to end, once the others have lost it, and the reverse
STOP_LIMIT_S = 5.0
POLL_S = 0.2


class Workers:
    """They start with the first order, so that who never learns never pays. All methods block."""

    def __init__(
        self, num_devices: int, device: torch.device, logs: Path, num_threads: int
    ) -> None:
        self.ranks = Ranks(0, num_devices)
        self._device = device
        self._logs = logs
        self._num_threads = num_threads
        self._processes: list[ManagedProcess] = []
        self._connections: list[Connection] = []

    @contextlib.contextmanager
    def running(self, order: str, *arguments: Any) -> Iterator[None]:
        """The others do what `order` names, while rank 0 does its part inside.

        Raises TrainingError with the log of a rank that ends over it.
        """
        try:
            if not self._processes:
                self._start()
            with self._watch_for_deaths():
                self._send(order, *arguments)
                yield
                self._wait_until_done(order)
        except PipeError:
            raise
        except (RuntimeError, OSError, EOFError) as error:
            self._raise_if_ended(error)
            raise

    def close(self) -> None:
        """Ends them all, whatever they do. May be called again."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.begin_stop(STOP_LIMIT_S)
        for process in self._processes:
            process.stop(STOP_LIMIT_S)
        if self._processes:
            self.ranks.leave()
        self._connections, self._processes = [], []

    def _start(self) -> None:
        refuse_missing_devices(self.ranks.size, self._device)
        folder = Path(tempfile.mkdtemp(prefix="openenv-pipe-ranks-"))  # for this user only
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(folder / "orders"))
                listener.listen(self.ranks.size)
                self._processes = [
                    self._launch(rank, folder / "orders") for rank in range(1, self.ranks.size)
                ]
                connections = dict(self._accept(listener) for _ in self._processes)
                self._connections = [connection for _, connection in sorted(connections.items())]
            rendezvous = folder / "rendezvous"
            self._send("join", rendezvous)
            self.ranks.join(rendezvous, self._device)
            self._wait_until_done("join")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _launch(self, rank: int, socket_path: Path) -> ManagedProcess:
        places = [str(PACKAGE_DIR.parent), os.environ.get("PYTHONPATH", "")]
        on_cpu = self._device.type == "cpu"
        num_threads = max(1, self._num_threads // self.ranks.size) if on_cpu else self._num_threads
        own = [rank, self.ranks.size, "cpu" if on_cpu else f"cuda:{rank}", num_threads]
        return ManagedProcess(
            [
                sys.executable,
                "-m",
                WORKER,
                str(socket_path),
                *map(str, own),
            ],
            log=self._logs / f"rank-{rank}.log",
            environment={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))},
            grace_s=STOP_LIMIT_S,
        )

    def _accept(self, listener: socket.socket) -> tuple[int, Connection]:
        """The next worker that is ready: its rank, and the connection to it."""
        latest = time.monotonic() + START_LIMIT_S
        while not select.select([listener], [], [], POLL_S)[0]:
            self._refuse_ended(wait_s=0.0)
            if time.monotonic() > latest:
                raise TrainingError(
                    f"the learner's ranks did not start within {START_LIMIT_S:g} s",
                    log=self._processes[0].log,
                )
        connection = Connection(listener.accept()[0].detach())
        return connection.recv(), connection  # it says its rank as soon as it is connected

    def _send(self, order: str, *arguments: Any) -> None:
        for connection in self._connections:
            connection.send((order, arguments))

    def _wait_until_done(self, order: str) -> None:
        for rank, connection in enumerate(self._connections, start=1):
            if not connection.poll(LONGEST_WAIT.total_seconds()):
                raise TrainingError(
                    f"rank {rank} of the learner has not finished {order!r} within {LONGEST_WAIT}",
                    log=self._processes[rank - 1].log,
                )
            connection.recv()

    @contextlib.contextmanager
    def _watch_for_deaths(self) -> Iterator[None]:
        """A rank that ends breaks a connection, which rank 0 sees when it waits for that rank.
        Inside a kernel of a GPU it sees nothing for LONGEST_WAIT, and nobody can call it back from
        there: then this process ends, and all that it has started with it."""
        if self._device.type == "cpu":
            yield
            return
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(POLL_S):
                if (death := self._death()) and not is_over.wait(EXIT_GRACE_S):
                    end_at_once(death)

        watching = threading.Thread(target=watch, name="ranks", daemon=True)
        watching.start()
        try:
            yield
        finally:
            is_over.set()
            watching.join()

    def _death(self) -> TrainingError | None:
        """Of a rank that has ended: one that a signal killed rather than those it took along."""
        codes = {rank: process.returncode for rank, process in enumerate(self._processes, start=1)}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        if not ended:
            return None
        rank = max(ended, key=lambda rank: ended[rank])  # 128 and a signal's number
        return TrainingError(
            f"rank {rank} of trainer.devices={self.ranks.size} ended with exit code {ended[rank]}",
            log=self._processes[rank - 1].log,
        )

    def _raise_if_ended(self, error: BaseException) -> None:
        """What rank 0 sees of another's end is a connection that broke."""
        if isinstance(error, OSError | EOFError) or wait(self._connections, EXIT_GRACE_S):
            self._refuse_ended(wait_s=EXIT_GRACE_S, error=error)

    def _refuse_ended(self, *, wait_s: float, error: BaseException | None = None) -> None:
        latest = time.monotonic() + wait_s
        while True:
            if death := self._death():
                raise death from error
            if time.monotonic() >= latest:
                return
            time.sleep(POLL_S)


def end_at_once(error: PipeError) -> None:
    """Ends the whole process, from any thread. The run can be resumed."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


def refuse_missing_devices(num_devices: int, device: torch.device) -> None:
    """Raises ConfigError where there are fewer GPUs than ranks. On a CPU ranks share its cores."""
    if device.type == "cuda" and num_devices > torch.cuda.device_count():
        raise ConfigError(
            f"trainer.devices={num_devices}, but torch sees {torch.cuda.device_count()} CUDA "
            "devices; set trainer.devices to at most so many, or device=cpu"
        )
