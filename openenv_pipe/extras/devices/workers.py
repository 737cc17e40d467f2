"""Start, command and end the processes of ranks 1 and up, from rank 0.

Each runs `worker.py` under a guardian. Orders go through a unix socket that only this user can
open, and that closes when either side ends. Tensors go through torch.distributed instead. Ranks on
other machines are those of a `NodeRanks`.
"""

import contextlib
import os
import select
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from openenv_pipe.errors import PipeError, RankLostError, TrainingError
from openenv_pipe.extras.devices.ranks import ConnectedRanks, Rendezvous, try_collective
from openenv_pipe.learner.devices import LONGEST_WAIT, NodeRanks, reject_missing_devices
from openenv_pipe.system.files import socket_folder
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.resources import PACKAGE_DIR
from openenv_pipe.system.stop_request import end_at_once

WORKER = "openenv_pipe.extras.devices.worker"
START_LIMIT_S = 300.0  # for all workers to import torch and connect
EXIT_GRACE_S = 10.0  # between a broken connection and the exit of the rank that broke it
NODE_GRACE_S = 60.0  # until a cluster knows that a node is lost
STOP_LIMIT_S = 5.0
POLL_S = 0.2


class LeadRanks(ConnectedRanks):
    """Rank 0, which lets the other ranks take part in what it does."""

    def __init__(self, workers: "Workers", size: int) -> None:
        super().__init__(0, size)
        self._workers = workers
        self._is_joined = False

    @contextlib.contextmanager
    def joined(self, order: str, *arguments: Any) -> Iterator[None]:
        if self._is_joined:  # on every rank, this is a part of the order under way
            yield
            return
        self._is_joined = True
        try:
            with self._workers.running(order, *arguments):
                yield
        finally:
            self._is_joined = False


class Workers:
    """The worker processes, which start with the first order. All methods block."""

    def __init__(
        self,
        num_devices: int,
        device: torch.device,
        logs: Path,
        num_threads: int,
        nodes: NodeRanks | None = None,
    ) -> None:
        """nodes: places the ranks that are not on this machine."""
        self.ranks = LeadRanks(self, num_devices)
        self._device = device
        self._logs = logs
        self._num_threads = num_threads
        self.nodes = nodes
        self._num_local = num_devices // (nodes.num_nodes if nodes else 1)
        self._has_started = False
        self._is_starting = False
        self._is_closed = False
        self._launching = threading.Lock()  # against `close`, which another thread may call
        self._processes: list[ManagedProcess] = []
        self._connections: list[Connection] = []
        self._folder: Path | None = None  # of the rendezvous, which every new group needs

    @contextlib.contextmanager
    def running(self, order: str, *arguments: Any) -> Iterator[None]:
        """Let the workers execute `order` while rank 0 does its part inside the block.

        Raises TrainingError, ConfigError and HostError.
        """
        try:
            self._reject_closed()
            if not self._has_started:
                self._has_started = self._is_starting = True
                try:
                    self._start()
                finally:
                    self._is_starting = False
                    if self._is_closed:  # by another thread, before all of them were there
                        self.close()
                self._reject_closed()
            with self._watch_for_deaths():
                self._send(order, *arguments)
                yield
                self._wait_until_done(order)
        except PipeError:
            raise
        except (RuntimeError, OSError, EOFError) as error:
            # An error of a file, such as a full disk, ends the other ranks too, but is the cause.
            if getattr(error, "filename", None) is None:
                self._raise_if_ended(error)
            raise

    def close(self) -> None:
        """End all workers for good, whatever they are doing. Another thread may be starting them.

        A second call does nothing.
        """
        with self._launching:
            self._is_closed = True
            processes, self._processes = self._processes, []
        for connection in self._connections:
            connection.close()
        for process in processes:
            process.begin_stop(STOP_LIMIT_S)
        for process in processes:
            process.stop(STOP_LIMIT_S)
        if self.nodes:
            self.nodes.close()
        if self._has_started:
            self.ranks.leave()
        self._connections, self._has_started = [], False
        if self._folder is not None and not self._is_starting:  # The start may wait for its files.
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def try_collective(self, num_bytes: int) -> float:
        """Add up a tensor over all ranks; return the seconds. Raises as `running`."""
        begin = time.monotonic()
        with self.running("try_collective", num_bytes):
            try_collective(self.ranks, self._device, num_bytes)
        return time.monotonic() - begin

    def _start(self) -> None:
        reject_missing_devices(self._num_local, self._device)
        if self.nodes:
            self.nodes.start(f"{WORKER}:Worker", self.ranks.size, self._num_threads_of_rank())
        folder = socket_folder("openenv-pipe-ranks-")
        self._folder = folder
        with socket.socket(socket.AF_UNIX) as orders:
            orders.bind(str(folder / "orders"))
            orders.listen(self.ranks.size)
            ranks = range(1, self._num_local)
            for rank in ranks:
                with self._launching:
                    self._reject_closed()
                    self._processes.append(self._launch(rank, folder / "orders"))
            connections = dict(self._accept(orders) for _ in ranks)
            self._connections = [connection for _, connection in sorted(connections.items())]
        listener = self.nodes.listen() if self.nodes else None
        rendezvous: Rendezvous = folder / "rendezvous"
        if listener:
            rendezvous = listener.getsockname()[:2]
        self._send("join", rendezvous)
        self.ranks.join(rendezvous, self._device, listener, self._reject_lost)
        self._wait_until_done("join")

    def _launch(self, rank: int, socket_path: Path) -> ManagedProcess:
        places = [str(PACKAGE_DIR.parent), os.environ.get("PYTHONPATH", "")]
        on_cpu = self._device.type == "cpu"
        device = "cpu" if on_cpu else f"cuda:{rank}"
        own = [rank, self.ranks.size, device, self._num_threads_of_rank()]
        return ManagedProcess(
            [sys.executable, "-m", WORKER, str(socket_path), *map(str, own)],
            log=self._logs / f"rank-{rank}.log",
            environment={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))},
            grace_s=STOP_LIMIT_S,
        )

    def _num_threads_of_rank(self) -> int:
        on_cpu = self._device.type == "cpu"
        return max(1, self._num_threads // self._num_local) if on_cpu else self._num_threads

    def _accept(self, listener: socket.socket) -> tuple[int, Connection]:
        """Wait for the next worker to connect; return its rank and the connection."""
        latest = time.monotonic() + START_LIMIT_S
        while not select.select([listener], [], [], POLL_S)[0]:
            self._reject_lost()
            if time.monotonic() > latest:
                raise TrainingError(
                    f"the learner's ranks did not start within {START_LIMIT_S:g} s",
                    log=self._logs / "rank-1.log",
                )
        connection = Connection(listener.accept()[0].detach())
        return connection.recv(), connection  # a worker first sends its rank

    def _reject_closed(self) -> None:
        if self._is_closed:
            raise TrainingError("the run ended before its learner's ranks had started")

    def _reject_lost(self) -> None:
        self._reject_closed()
        self._reject_ended(wait_s=0.0)

    def _send(self, order: str, *arguments: Any) -> None:
        for connection in self._connections:
            connection.send((order, arguments))
        if self.nodes:
            self.nodes.send(order, arguments)

    def _wait_until_done(self, order: str) -> None:
        for rank, connection in enumerate(self._connections, start=1):
            if not connection.poll(LONGEST_WAIT.total_seconds()):
                raise TrainingError(
                    f"rank {rank} of the learner has not finished {order!r} within {LONGEST_WAIT}",
                    log=self._processes[rank - 1].log,
                )
            connection.recv()
        if self.nodes:
            self.nodes.wait_until_done(order)

    @contextlib.contextmanager
    def _watch_for_deaths(self) -> Iterator[None]:
        """On GPUs, end this process if a worker dies while rank 0 is blocked in a kernel.

        On a CPU, rank 0 sees a worker's death as a broken connection. A blocked NCCL kernel cannot
        be interrupted before LONGEST_WAIT, so a thread ends the process and its children.
        """
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

    def _death(self) -> PipeError | None:
        if self.nodes and (failure := self.nodes.failure()):
            return failure
        codes = {rank: process.returncode for rank, process in enumerate(self._processes, start=1)}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        if not ended:
            return None
        rank = max(ended, key=lambda rank: ended[rank])  # that of a signal first: it is above 128
        return RankLostError(
            f"rank {rank} of trainer.devices={self.ranks.size} ended with exit code {ended[rank]}",
            log=self._processes[rank - 1].log,
        )

    def _raise_if_ended(self, error: BaseException) -> None:
        """Raise an error if a rank has ended, which rank 0 sees as a broken connection."""
        if self.nodes:
            self._reject_ended(wait_s=NODE_GRACE_S, error=error)
            if isinstance(error, dist.DistError | OSError | EOFError) or "gloo" in str(error):
                reason = str(error).splitlines()[0]
                raise RankLostError(f"the learner's other nodes cannot be reached: {reason}")
        elif isinstance(error, OSError | EOFError) or wait(self._connections, EXIT_GRACE_S):
            self._reject_ended(wait_s=EXIT_GRACE_S, error=error)

    def _reject_ended(self, *, wait_s: float, error: BaseException | None = None) -> None:
        latest = time.monotonic() + wait_s
        while True:
            if death := self._death():
                raise death from error
            if time.monotonic() >= latest:
                return
            time.sleep(POLL_S)
