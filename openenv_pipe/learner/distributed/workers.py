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
LAST_WORDS_S = 10.0  # for a rank to end, once the others have lost it, and the reverse
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
        self._lines: list[Connection] = []

    @contextlib.contextmanager
    def doing(self, order: str, *arguments: Any) -> Iterator[None]:
        """The others do what `order` names, while rank 0 does its part inside.

        Raises TrainingError with the log of a rank that ends over it.
        """
        try:
            if not self._processes:
                self._start()
            with self._watched():
                self._tell(order, *arguments)
                yield
                self._wait_until_done(order)
        except PipeError:
            raise
        except (RuntimeError, OSError, EOFError) as error:
            self._raise_if_ended(error)
            raise

    def close(self) -> None:
        """Ends them all, whatever they do. May be called again."""
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.begin_stop(STOP_LIMIT_S)
        for process in self._processes:
            process.stop(STOP_LIMIT_S)
        if self._processes:
            self.ranks.leave()
        self._lines, self._processes = [], []

    def _start(self) -> None:
        refuse_missing_devices(self.ranks.size, self._device)
        folder = Path(tempfile.mkdtemp(prefix="openenv-pipe-ranks-"))  # for this user only
        try:
            with socket.socket(socket.AF_UNIX) as door:
                door.bind(str(folder / "orders"))
                door.listen(self.ranks.size)
                self._processes = [
                    self._launch(rank, folder / "orders") for rank in range(1, self.ranks.size)
                ]
                lines = dict(self._answer(door) for _ in self._processes)
                self._lines = [line for _, line in sorted(lines.items())]
            meeting = folder / "meeting"
            self._tell("join", meeting)
            self.ranks.join(meeting, self._device)
            self._wait_until_done("join")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _launch(self, rank: int, door: Path) -> ManagedProcess:
        places = [str(PACKAGE_DIR.parent), os.environ.get("PYTHONPATH", "")]
        on_cpu = self._device.type == "cpu"
        num_threads = max(1, self._num_threads // self.ranks.size) if on_cpu else self._num_threads
        own = [rank, self.ranks.size, "cpu" if on_cpu else f"cuda:{rank}", num_threads]
        return ManagedProcess(
            [
                sys.executable,
                "-m",
                WORKER,
                str(door),
                *map(str, own),
            ],
            log=self._logs / f"rank-{rank}.log",
            environment={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))},
            grace_s=STOP_LIMIT_S,
        )

    def _answer(self, door: socket.socket) -> tuple[int, Connection]:
        """The next worker that is ready: its rank, and the line to it."""
        latest = time.monotonic() + START_LIMIT_S
        while not select.select([door], [], [], POLL_S)[0]:
            self._refuse_ended(wait_s=0.0)
            if time.monotonic() > latest:
                raise TrainingError(
                    f"the learner's ranks did not start within {START_LIMIT_S:g} s",
                    log=self._processes[0].log,
                )
        line = Connection(door.accept()[0].detach())
        return line.recv(), line  # it says its rank as soon as it is connected

    def _tell(self, order: str, *arguments: Any) -> None:
        for line in self._lines:
            line.send((order, arguments))

    def _wait_until_done(self, order: str) -> None:
        for rank, line in enumerate(self._lines, start=1):
            if not line.poll(LONGEST_WAIT.total_seconds()):
                raise TrainingError(
                    f"rank {rank} of the learner has not finished {order!r} within {LONGEST_WAIT}",
                    log=self._processes[rank - 1].log,
                )
            line.recv()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """A rank that ends breaks a connection, which rank 0 sees when it waits for that rank.
        Inside a kernel of a GPU it sees nothing for LONGEST_WAIT, and nobody can call it back from
        there: then this process ends, and all that it has started with it."""
        if self._device.type == "cpu":
            yield
            return
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(POLL_S):
                if (death := self._death()) and not is_over.wait(LAST_WORDS_S):
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
        if isinstance(error, OSError | EOFError) or wait(self._lines, LAST_WORDS_S):
            self._refuse_ended(wait_s=LAST_WORDS_S, error=error)

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
