"""Run a sweep's jobs one after another.

A sweep starts it as `python -m openenv_pipe.extras.sweeps.worker_process CHANNEL SERVERS`; the
sweep's side is `worker`. A job finds what a process of its own would have: environment variables,
current folder, module search path, torch's random state, and the modules of users as they are on
disk. Of what it leaves behind, only what libraries hold stays.
"""

import gc
import os
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from openenv_pipe.cli import main as cli
from openenv_pipe.cli.control import stop_signals
from openenv_pipe.cli.logs import configure_logging
from openenv_pipe.cli.progress import build_progress
from openenv_pipe.cli.streams import keep_streams
from openenv_pipe.extras.sweeps.worker import INTERRUPTED, STOP, WorkerJob
from openenv_pipe.system.process_settings import (
    collect_as_usual,
    collect_rarely,
    set_library_defaults,
)
from openenv_pipe.system.stop_request import StopRequest
from openenv_pipe.system.user_modules import users_modules

if TYPE_CHECKING:
    from openenv_pipe.pipeline.servers import ServerProvider

# What a run imports before its first step, or at its end.
MODULES = ("openenv_pipe.pipeline", "aiohttp", "matplotlib.figure", "torch")


def main() -> None:
    """Import what runs need, and run jobs until the channel is closed."""
    channel, servers = Channel(int(sys.argv[1])), sys.argv[2]
    keep_streams()
    configure_logging(0, "text")
    collect_rarely()
    set_library_defaults()
    for name in MODULES:
        import_module(name)
    from openenv_pipe.extras.sweeps.leased_host import sharing

    collect_as_usual()
    with sharing(Path(servers) if servers else None, channel.send) as provider:
        channel.serve(provider)


class OneStop(StopRequest):
    """A request to stop that counts once: a second one would cut the saving short."""

    def __init__(self) -> None:
        super().__init__()
        self._is_first = threading.Lock()

    def make(self) -> None:
        if self._is_first.acquire(blocking=False):
            super().make()


class Channel:
    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._connection = Connection(descriptor)
        self._sending = threading.Lock()
        self._stop = OneStop()  # of the newest job
        self._jobs: SimpleQueue[tuple[WorkerJob, int, OneStop] | None] = SimpleQueue()
        threading.Thread(target=self._listen, name="channel", daemon=True).start()

    def serve(self, servers: "ServerProvider") -> None:
        for number in stop_signals():
            signal.signal(number, lambda *_: self._stop.make())
        surroundings = Surroundings()
        self.send("ready")
        while (job := self._jobs.get()) is not None:
            exit_code = run_job(*job, servers)
            surroundings.restore()
            self.send("end", exit_code)

    def send(self, *message: Any) -> None:
        """Send a message from any thread."""
        with self._sending:
            self._connection.send(message)

    def _listen(self) -> None:
        """Receive jobs, and requests to stop the job in progress, until the channel is closed."""
        with suppress(EOFError, OSError):
            while True:
                message = self._connection.recv()
                if message == STOP:
                    self._stop.make()
                    continue
                self._stop = OneStop()
                self._jobs.put((message, recv_handle(self._connection), self._stop))
        self._stop.make()  # The sweep is gone, or no longer wants the job.
        self._jobs.put(None)


def run_job(job: WorkerJob, output: int, stop: OneStop, servers: "ServerProvider") -> int:
    """Run one job and return its exit code. output: the descriptor to print to; it is closed."""
    streams = {number: os.dup(number) for number in (1, 2)}
    for number in streams:
        os.dup2(output, number)
    os.close(output)
    try:
        return cli.exit_code_of(partial(train, job, stop, servers))
    except KeyboardInterrupt:  # `stop` has ended the run, and its record says so.
        return INTERRUPTED
    finally:
        sys.stderr.flush()
        for number, descriptor in streams.items():
            os.dup2(descriptor, number)
            os.close(descriptor)


def train(job: WorkerJob, stop: OneStop, servers: "ServerProvider") -> None:
    """Train the run in its folder, which is new or was checked by the sweep."""
    from openenv_pipe import pipeline
    from openenv_pipe.runs.folder import RunFolder

    os.environ.update(job.secrets)
    progress = build_progress()
    control = pipeline.RunControl(progress=progress, stop=stop)
    try:
        if job.resumes:
            command = ["openenv-pipe", "train", "--resume", job.run]
            pipeline.resume(job.run, [], command, control, servers, trust=True)
        else:
            pipeline.begin(RunFolder.open(job.run), servers, control, trust=True)
    finally:
        progress.close()


class Surroundings:
    """What a job may change in this process, and the next job must find as it was."""

    def __init__(self) -> None:
        self._variables = dict(os.environ)
        self._folder = Path.cwd()
        self._search_path = list(sys.path)
        self._modules = set(sys.modules)
        torch = sys.modules.get("torch")
        self._seed = torch.initial_seed() if torch else None

    def restore(self) -> None:
        """Restore it, and free the memory of the job."""
        os.environ.clear()
        os.environ.update(self._variables)
        os.chdir(self._folder)
        sys.path[:] = self._search_path
        for name in users_modules().keys() - self._modules:
            del sys.modules[name]
        gc.collect()
        if self._seed is not None:
            torch = sys.modules["torch"]
            torch.manual_seed(self._seed)
            torch.cuda.empty_cache()  # does nothing where CUDA was not used


if __name__ == "__main__":
    main()
