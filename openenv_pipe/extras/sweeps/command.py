"""Run a sweep: list or propose its jobs, launch and watch them, and report at the end.

After a failed job the others continue. A request to stop asks all jobs, wherever they run, to save
and stop; `train -m --resume` continues them.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.secrets import assigned_secrets, known_secrets, restore_in_config
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.sweeps.folder import Job, SweepFolder, stop_all_mark
from openenv_pipe.extras.sweeps.job import Order, Orders
from openenv_pipe.extras.sweeps.multirun import MultirunRequest, read_request
from openenv_pipe.extras.sweeps.schema import RayJobs
from openenv_pipe.extras.sweeps.watch import Watch
from openenv_pipe.extras.sweeps.worker import Worker
from openenv_pipe.system.optional_packages import needed_by
from openenv_pipe.system.ray_connection import (
    HEAD_CHECK_S,
    NUM_FAILED_CHECKS,
    SPARES_GUARDIANS,
    RayConnection,
    in_a_line,
)
from openenv_pipe.system.resources import short_path
from openenv_pipe.system.tables import Table

if TYPE_CHECKING:
    from openenv_pipe.extras.sweeps.cli import SweepSignals, SweepTable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    has_succeeded: bool  # every job has finished or was pruned
    table: Table  # of the jobs
    notes: Sequence[str]  # on servers that jobs shared, and where the results are


def sweep(
    overrides: Sequence[str],
    command: Sequence[str],
    progress: "SweepTable",
    stopping: "SweepSignals",
) -> SweepResult:
    """Run a job for each combination of values, or a search. Raises ConfigError."""
    request = read_request(overrides)
    _keep_secrets(request)
    config = _first_config(request, progress)
    folder = SweepFolder.create(Path(config.runs_dir), overrides, command)
    if request.sweep.type == "grid":
        for job in request.jobs:
            folder.add_job(job)
        folder.write()
    return _carry_out(folder, request, progress, stopping)


def resume(
    path: Path, progress: "SweepTable", stopping: "SweepSignals", *, trust: bool
) -> SweepResult:
    """Resume a sweep that was stopped; finished jobs stay as they are. Raises RunFolderError."""
    folder = SweepFolder.open(path)
    if not trust:
        folder.check_trust()
    request = read_request(restore_in_config(folder.record.overrides))
    folder.resume()
    return _carry_out(folder, request, progress, stopping)


def _keep_secrets(request: MultirunRequest) -> None:
    """Put secrets of the command line into the environment, under the names of their marks.

    Jobs read them there, because secrets are not written to files. Raises ConfigError.
    """
    secrets = known_secrets({})
    for override in {each: None for job in request.jobs for each in job}:
        for name, value in assigned_secrets(override, secrets):
            if os.environ.setdefault(name, value) != value:
                raise ConfigError(
                    f"{name} has several values in this sweep, or another one in the environment; "
                    "jobs read secrets from the environment by name; put each value into its own "
                    "environment variable, and write ${oc.env:NAME} in its place"
                )


def _first_config(request: MultirunRequest, progress: "SweepTable") -> RunConfig:
    """Return the configuration of the first job that composes and whose model is available.

    Raises the first ConfigError if there is none. On a cluster, only its nodes need it.
    """
    first_error: ConfigError | None = None
    proposed = [f"{each.key}={each.values[0]}" for each in request.parameters]
    without_model: set[tuple[str, ...]] = set()
    for job in request.jobs:
        chosen = tuple(each for each in job if each.startswith(("conf=", "model")))
        if chosen in without_model:
            continue
        try:
            config = compose([*job, *proposed]).config
            is_of_hub = config.engine.capabilities.needs_tokenizer and config.model.type == "hub"
            if is_of_hub and request.sweep.ray.address is None:
                # Imported late, because it imports torch, which takes long.
                from openenv_pipe.models.hub import provide_model

                without_model.add(chosen)
                asyncio.run(provide_model(config.model, progress.note))
            return config
        except ConfigError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _carry_out(
    folder: SweepFolder, request: MultirunRequest, progress: "SweepTable", stopping: "SweepSignals"
) -> SweepResult:
    progress.note(f"sweep {folder.record.stamp} in {short_path(folder.path)}")
    stop = stop_all_mark(folder.path, folder.record.attempt).touch
    worker = Worker(folder.path / "servers" / f"attempt_{folder.record.attempt}")
    try:
        with stopping.accepting(stop, partial(_kill_runs, folder)):
            try:
                if request.sweep.type == "search":
                    watch = _search(folder, request, worker, progress)
                else:
                    watch = Watch(folder, progress)
                    _launch(folder, request, worker, watch, folder.record.jobs)
            finally:
                worker.close()
    except BaseException:
        folder.end("interrupted" if stopping.is_made else "failed")
        raise
    return _conclude(folder, worker, watch, was_stopped=stopping.is_made)


def _launch(
    folder: SweepFolder, request: MultirunRequest, worker: Worker, watch: Watch, jobs: Sequence[Job]
) -> None:
    """Run the waiting jobs, here in turn or at once on a Ray cluster, and watch them."""
    waiting = [job for job in jobs if job.status == "waiting"]
    orders = Orders(
        sweep=folder.path,
        attempt=folder.record.attempt,
        owner=folder.record.process,
        jobs=tuple(
            Order(index=job.index, overrides=tuple(job.overrides), folder=job.folder)
            for job in waiting
        ),
    )
    if not waiting:
        return
    with watch.watching():
        if request.sweep.ray.address is None:
            for order in orders.jobs:
                orders.do(order, worker)
        else:
            _place(orders, request.sweep.ray)


def _place(orders: Orders, settings: RayJobs) -> None:
    """Run each job in a process on any node of a Ray cluster that has room for it.

    A job whose process or node is lost is not repeated.

    Raises HostError if the cluster cannot be joined, or its head is lost.
    """
    assert settings.address is not None
    cluster = RayConnection(settings.address)
    try:
        task = cluster.ray.remote(_do_in_folder).options(
            num_cpus=settings.cpus_per_job,
            num_gpus=settings.gpus_per_job,
            runtime_env=SPARES_GUARDIANS,
            max_retries=0,
            scheduling_strategy="SPREAD",
        )
        waiting = {task.remote(Path.cwd(), orders, n): n for n in range(len(orders.jobs))}
        num_failed = 0
        while waiting:
            done, _ = cluster.ray.wait(list(waiting), timeout=HEAD_CHECK_S)
            for each in done:
                job = orders.jobs[waiting.pop(each)]
                try:
                    cluster.ray.get(each)
                except cluster.ray.exceptions.RayError as error:
                    _log.warning("job %d was lost: %s", job.index, in_a_line(error))
            num_failed = 0 if done or cluster.head_answers() else num_failed + 1
            if num_failed == NUM_FAILED_CHECKS:
                raise cluster.head_lost("sweep")
    finally:
        cluster.close()


def _do_in_folder(folder: Path, orders: Orders, number: int) -> None:
    """Do a job on a node; relative paths mean the sweep's files where the node has them."""
    if folder.is_dir():
        os.chdir(folder)
    orders(number)


def _search(
    folder: SweepFolder, request: MultirunRequest, worker: Worker, progress: "SweepTable"
) -> Watch:
    """Propose, launch and judge a few jobs at a time until there are enough."""
    with needed_by("sweep=search", "optuna"):
        from openenv_pipe.extras.sweeps.search import Search
    assert request.sweep.type == "search"
    search = Search(folder, request.sweep, request.parameters)
    watch = Watch(folder, progress, search)
    for job in list(folder.record.jobs):
        if job.status == "waiting":
            search.try_again(job)
        elif job.value is None:  # It ended after the sweep's process had gone.
            search.conclude(job)
    batch = [job for job in folder.record.jobs if job.status == "waiting"]
    while not stop_all_mark(folder.path, folder.record.attempt).exists():
        _launch(folder, request, worker, watch, batch)
        for job in batch:
            search.conclude(folder.record.jobs[job.index])
        batch = search.propose(request.jobs[0])
        if not batch:
            break
    if (best := search.best()) is not None:
        metric = f"{request.sweep.metric} {best.value:.4g}"
        progress.note(f"best: job {best.index} {best.run} {metric} {watch.own_overrides(best)}")
    return watch


def _conclude(
    folder: SweepFolder, worker: Worker, watch: Watch, *, was_stopped: bool
) -> SweepResult:
    has_succeeded = all(job.status in ("finished", "pruned") for job in folder.record.jobs)
    folder.end("interrupted" if was_stopped else "finished" if has_succeeded else "failed")
    notes = [
        f"{kind} servers: started {_times(worker.num_starts[kind])}, used {_times(number)}"
        for kind, number in worker.num_leases.items()
    ]
    place = short_path(folder.path)
    resume_command = f"resume with: openenv-pipe train -m --resume {place}"
    notes.append(resume_command if was_stopped else f"results: {place}")
    return SweepResult(has_succeeded=has_succeeded, table=watch.table(), notes=notes)


def _kill_runs(folder: SweepFolder) -> None:
    for job in folder.record.jobs:
        run = folder.run_folder(job.index)
        if run is None or run.status != "running":
            continue
        process = run.record.process
        ours = process.host == folder.record.process.host and process != folder.record.process
        if ours:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
