"""Sweeps without real runs: the folder, jobs, shared servers, and the search."""

import asyncio
import dataclasses
import functools
import io
import json
import os
import pickle
import shutil
import uuid
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from run_samples import append

from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import EnvConfig, ServingConfig
from openenv_pipe.config.secrets import restore_in_config
from openenv_pipe.environments.hosts.pool import SessionPool
from openenv_pipe.errors import ConfigError, HostError, RunFolderError
from openenv_pipe.extras.sweeps import command as sweep_command
from openenv_pipe.extras.sweeps import leased_host as leased_module
from openenv_pipe.extras.sweeps.cli import SweepSignals, SweepTable, multirun
from openenv_pipe.extras.sweeps.folder import (
    JobFile,
    SweepFolder,
    find_newest_sweep,
    job_file,
    stop_all_mark,
    stop_mark,
)
from openenv_pipe.extras.sweeps.job import Order, Orders
from openenv_pipe.extras.sweeps.leased_host import SharedServers, server_key, sharing
from openenv_pipe.extras.sweeps.multirun import Parameter, read_request
from openenv_pipe.extras.sweeps.watch import Watch
from openenv_pipe.extras.sweeps.worker import Worker
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.system.files import write_json
from openenv_pipe.system.process_id import ProcessId

LIMIT_S = 20.0


@pytest.fixture
def sweep(tmp_path) -> SweepFolder:
    """A sweep of two jobs, neither of which has started."""
    overrides = ["conf=echo", f"runs_dir={tmp_path}", "seed=0,1"]
    folder = SweepFolder.create(tmp_path, overrides, ["openenv-pipe", "train", "-m", *overrides])
    for job in read_request(overrides).jobs:
        folder.add_job(job)
    folder.write()
    return folder


def begin_run(sweep: SweepFolder, index: int) -> RunFolder:
    """Do what a job's process does when it starts."""
    config = compose(sweep.record.jobs[index].overrides).config
    run = RunFolder.create(config, overrides=[], command=[], sweep=sweep.record.stamp)
    where = f"../../{run.record.id}"
    said = JobFile(attempt=sweep.record.attempt, run=run.record.id, folder=where)
    write_json(job_file(sweep.path, index), said.model_dump())
    return run


# --- the folder --------------------------------------------------------------------------------


def test_sweeps_of_one_second_get_folders_of_their_own(tmp_path):
    stamps = {SweepFolder.create(tmp_path, [], []).record.stamp for _ in range(3)}
    assert len(stamps) == 3


def test_secrets_are_not_written_and_come_back(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "geheim-geheim")
    folder = SweepFolder.create(tmp_path, ["a=geheim-geheim"], ["train", "a=geheim-geheim"])
    folder.add_job(["a=geheim-geheim", "seed=1"])
    folder.write()
    assert "geheim" not in (folder.path / "sweep.json").read_text()
    (job,) = SweepFolder.open(folder.path).record.jobs
    assert restore_in_config(job.overrides) == ["a=geheim-geheim", "seed=1"]


def test_a_folder_that_is_no_sweep_is_rejected(tmp_path):
    with pytest.raises(RunFolderError, match="it has no sweep"):
        SweepFolder.open(tmp_path)


def test_the_newest_of_all_folders_of_runs_is_found(tmp_path):
    first, second = tmp_path / "runs", tmp_path / "other"
    with pytest.raises(
        RunFolderError, match=r"there is no sweep in .*runs/sweeps or .*other/sweeps"
    ):
        find_newest_sweep([first, second])
    old, new = (SweepFolder.create(each, [], []) for each in (second, first))
    assert find_newest_sweep([first, second]) == new.path
    old.write(created=old.record.created + timedelta(days=1))
    assert find_newest_sweep([first, second]) == old.path


def test_as_a_run_a_sweep_names_the_command_that_continues_it(sweep):
    with pytest.raises(RunFolderError, match=f"train -m --resume {sweep.path}"):
        RunFolder.open(sweep.path)


def test_a_job_has_the_status_of_its_run(sweep):
    assert sweep.refresh(0).status == "waiting"
    run = begin_run(sweep, 0)
    assert sweep.refresh(0).status == "running"
    assert sweep.refresh(0).run == run.record.id
    assert run.record.sweep == sweep.record.stamp
    run.finish("failed", cause="it broke")
    assert sweep.refresh(0).status == "failed"
    assert sweep.refresh(0).cause == "it broke"


def test_a_stop_of_one_job_is_no_interruption(sweep):
    run = begin_run(sweep, 0)
    stop_mark(sweep.path, 0).touch()
    run.finish("interrupted", cause="interrupted")
    assert sweep.refresh(0).status == "pruned"


def test_a_sweep_goes_on_with_what_is_not_over(sweep):
    begin_run(sweep, 0).finish("finished")
    begin_run(sweep, 1).finish("interrupted", cause="interrupted")
    sweep.end("interrupted")
    again = SweepFolder.open(sweep.path)
    again.resume()
    assert [job.status for job in again.record.jobs] == ["finished", "waiting"]
    assert again.record.attempt == 2
    assert again.refresh(1).status == "waiting"  # the folder's file is from the first attempt
    assert again.record.jobs[1].folder is not None  # the run to resume


def test_a_running_sweep_is_not_taken_over(sweep):
    with pytest.raises(RunFolderError, match="is running"):
        SweepFolder.open(sweep.path).resume()


def test_a_running_job_is_not_begun_twice(sweep):
    begin_run(sweep, 0)
    sweep.end("interrupted")
    with pytest.raises(RunFolderError, match="is still running"):
        SweepFolder.open(sweep.path).resume()


# --- a job's process -----------------------------------------------------------------------------


def orders_of(sweep: SweepFolder, *overrides: str) -> Orders:
    return Orders(
        sweep=sweep.path,
        attempt=1,
        owner=ProcessId.of_this_process(),
        jobs=(Order(index=0, overrides=overrides, folder=None),),
    )


def test_a_bad_job_fails_by_itself(sweep):
    orders_of(sweep, "conf=echo", "trainer.stpes=1")(0)
    job = sweep.refresh(0)
    assert job.status == "failed"
    assert "did you mean trainer.steps" in job.cause
    assert job.run is None


@pytest.mark.parametrize("mark", [stop_all_mark, stop_mark])
def test_a_job_of_a_stopped_sweep_does_not_begin(sweep, mark):
    mark(sweep.path, 1 if mark is stop_all_mark else 0).touch()
    orders_of(sweep, "conf=echo")(0)
    assert sweep.refresh(0).status == "waiting"


def test_a_job_does_not_outlive_its_sweep(sweep):
    dead = ProcessId(host=ProcessId.of_this_process().host, pid=2**22 + 1, started_s=0.0)
    dataclasses.replace(orders_of(sweep, "conf=echo"), owner=dead)(0)
    assert sweep.refresh(0).status == "waiting"


@pytest.mark.parametrize(
    ("exit_code", "stopped", "status"),
    [(143, True, "interrupted"), (137, False, "failed"), (2, False, "failed")],
)
def test_a_run_that_could_not_say_how_it_ended(sweep, monkeypatch, exit_code, stopped, status):
    def run(worker, job, log, is_stopped):
        log.write_text("loading\nerror: no such word list\n")
        if stopped:
            stop_all_mark(sweep.path, 1).touch()
        assert is_stopped() == stopped
        return exit_code

    monkeypatch.setattr(Worker, "run", run)
    orders_of(sweep, "conf=echo", f"runs_dir={sweep.path.parents[1]}")(0)
    job = sweep.refresh(0)
    assert job.status == status
    assert stopped or "no such word list" in job.cause


# --- secrets of the command line ---------------------------------------------------------------

ATTACHED = ("conf=echo", "host=attach", "host.urls=[http://127.0.0.1:9]")


@pytest.mark.parametrize(
    "header",
    [
        "+host.headers.Authorization=Bearer ${{oc.env:MY_TOKEN}}",
        "+host.headers.Authorization=Bearer {secret}",
        "host.headers={{Authorization: 'Bearer {secret}'}}",
    ],
)
def test_a_secret_reaches_its_jobs_and_is_never_written(tmp_path, monkeypatch, header):
    # run folders may hold this file's text as uncommitted changes, so the secret is not in it
    secret = uuid.uuid4().hex
    monkeypatch.setattr(os, "environ", os.environ.copy())
    if "oc.env" in header:
        monkeypatch.setenv("MY_TOKEN", secret)
    played, written = [], []

    def run(worker, job, log, is_stopped):
        folder = RunFolder.open(job.run)
        played.append(folder.config_to_run().host.headers["Authorization"])
        folder.finish("finished")
        return 0

    def do(orders, job, worker):
        written.append(pickle.dumps(orders))  # as for jobs on other machines
        do_job(orders, job, worker)

    do_job = Orders.do
    monkeypatch.setattr(Worker, "run", run)
    monkeypatch.setattr(Orders, "do", do)
    overrides = [*ATTACHED, f"runs_dir={tmp_path}", header.format(secret=secret), "seed=0,1"]
    assert sweep_command.sweep(
        overrides, ["openenv-pipe", "train", "-m", *overrides], SweepTable(), SweepSignals(print)
    ).has_succeeded
    assert played == [f"Bearer {secret}"] * 2
    written += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(secret.encode() in each for each in written)


def test_a_secret_with_two_values_is_rejected_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    values = "+host.headers.Authorization=geheim-1,geheim-2"
    with pytest.raises(ConfigError, match=r"Authorization has several values.*oc\.env"):
        sweep_command.sweep(
            [*ATTACHED, f"runs_dir={tmp_path}", values], [], SweepTable(), SweepSignals(print)
        )
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_that_is_resumed_with_other_words_says_how_to_change_it(sweep, tmp_path):
    with pytest.raises(ConfigError) as raised:
        multirun(["seed=7"], str(sweep.path), None, None, trust=False)
    assert "'seed=7' cannot change it" in str(raised.value)
    command = f"openenv-pipe train -m conf=echo runs_dir={tmp_path} seed=0,1"
    assert str(raised.value).endswith(command)
    with pytest.raises(ConfigError, match="train -m takes no --fork"):
        multirun([], None, "echo/0001", None, trust=False)


# --- shared servers ------------------------------------------------------------------------------


class FakeServers:
    """Shared servers that start and end at once; the class records all of them."""

    made: ClassVar[list["FakeServers"]] = []

    def __init__(self, *_):
        self.urls = [f"http://server/{len(self.made)}"]
        self.key = "a-key"
        self.failure = None
        self.unclean = False
        self.num_clears = 0
        self.closed = False
        self.may_be_clear = asyncio.Event()
        self.may_be_clear.set()
        self.made.append(self)

    def facts(self):
        return {"env_code": "abc"}

    async def start(self):
        await asyncio.sleep(0)

    async def clear(self):
        self.num_clears += 1
        await asyncio.sleep(0.01)
        await self.may_be_clear.wait()
        if self.unclean:
            raise HostError("sessions are left")

    async def close(self):
        self.closed = True


@pytest.fixture
async def shared(tmp_path, monkeypatch):
    monkeypatch.setattr(leased_module, "_build", FakeServers)
    monkeypatch.setattr(FakeServers, "made", [])
    found = SharedServers(tmp_path / "servers", lambda *_: None)
    yield found
    await found.close()
    assert all(servers.closed for servers in FakeServers.made)


@functools.cache
def composed_request() -> str:
    config = compose(["conf=echo"]).config
    return ServingConfig(env=config.env, host=config.host).model_dump_json()


def request_of(block: str = "env", **changes: Any) -> dict:
    serving = json.loads(composed_request())
    serving[block] |= changes
    return serving


async def lease_once(shared: SharedServers, block: str = "env", **changes: Any) -> str:
    leased = await shared.lease(request_of(block, **changes))
    shared.take_back(leased)
    return leased.servers.urls[0]


async def test_jobs_in_turn_have_the_same_servers(shared):
    assert {await lease_once(shared, max_turns=turns) for turns in (1, 2, 3)} == {"http://server/0"}
    assert len(FakeServers.made) == 1


async def test_servers_are_cleared_between_jobs_and_say_how_many_had_them(shared):
    await lease_once(shared)
    leased = await shared.lease(request_of())
    assert FakeServers.made[0].num_clears == 2  # once at the start and once between the jobs
    assert leased.num_jobs == 2


async def test_two_leases_at_a_time_share_no_server(shared):
    leases = await asyncio.gather(*(shared.lease(request_of()) for _ in range(2)))
    assert len({lease.servers.urls[0] for lease in leases}) == 2


@pytest.mark.parametrize(
    ("block", "changes"),
    [
        ("env", {"variables": {"SIZE": "3"}}),
        ("env", {"package": "wordle"}),
        ("env", {"command": ["my-server"]}),
        ("host", {"sessions_per_server": 3}),
    ],
)
async def test_another_need_gets_another_server(shared, block, changes):
    assert await lease_once(shared) != await lease_once(shared, block, **changes)


def test_the_code_of_an_environment_is_in_the_key(tmp_path):
    (tmp_path / "mine").mkdir()
    wanted = request_of(package=str(tmp_path / "mine"))
    before = server_key(wanted)
    (tmp_path / "mine" / "app.py").write_text("another = 1\n")
    assert server_key(wanted) != before


def test_what_says_nothing_of_servers_is_not_in_the_key():
    assert set(EnvConfig.model_fields) >= leased_module.CLIENT_KEYS
    changes: list[dict[str, Any]] = [{}, {"max_turns": 2}, {"tasks": {}}]
    assert len({server_key(request_of(**each)) for each in changes}) == 1


@pytest.mark.parametrize("fault", [{"unclean": True}, {"failure": HostError("used up")}])
async def test_servers_that_have_failed_or_cannot_be_cleared_are_ended(shared, fault):
    await lease_once(shared)
    vars(FakeServers.made[0]).update(fault)
    assert await lease_once(shared) == "http://server/1"
    assert FakeServers.made[0].closed


async def test_a_job_that_is_stopped_while_it_waits_leaves_the_servers_to_the_next(shared):
    leased = await shared.lease(request_of())
    leased.servers.may_be_clear.clear()
    shared.take_back(leased)
    waiting = asyncio.create_task(shared.lease(request_of()))
    while not leased.is_leased:  # until it waits for the servers to be cleared
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    leased.servers.may_be_clear.set()
    assert await lease_once(shared) == "http://server/0"


async def test_runs_on_event_loops_of_their_own_have_the_same_servers(tmp_path, monkeypatch):
    """A host learns that its server has another address, and that there is none any more."""
    monkeypatch.setattr(leased_module, "_build", FakeServers)
    monkeypatch.setattr(FakeServers, "made", [])
    monkeypatch.setattr(SessionPool, "open_all", open_nothing)
    config, reported = compose(["conf=echo"]).config, []
    with sharing(tmp_path, lambda *message: reported.append(message)) as provider:

        async def run() -> None:
            host = provider.host(config, tmp_path)
            await host.start()
            facts.append(host.facts())
            await host.close()

        facts: list[dict] = []
        for _ in range(2):
            await asyncio.to_thread(asyncio.run, run())
        host = provider.host(config, tmp_path)
        FakeServers.made[0].urls = []
        starting = asyncio.create_task(host.start())
        await asyncio.wait({starting}, timeout=5 * leased_module.POLL_S)
        assert not starting.done()  # the server is being restarted
        FakeServers.made[0].urls = ["http://elsewhere"]
        await asyncio.wait_for(starting, LIMIT_S)
        assert host.urls == ["http://elsewhere"]
        FakeServers.made[0].failure = HostError("host.max_restarts=2 are used up")
        with pytest.raises(HostError, match="used up"):
            async with asyncio.timeout(LIMIT_S), host.session():
                pass
        await host.close()
    assert [each["shared_servers"]["num_jobs_before"] for each in facts] == [0, 1]
    assert reported == [("lease", "environment", is_new) for is_new in (True, False, False)]
    assert FakeServers.made[0].closed


async def open_nothing(pool, patience_s=0.0):
    """Opens no session: there are no servers, and each request waits for a free slot."""
    for slots in pool._servers.values():
        slots.num_free = 0


async def test_idle_servers_are_ended_when_there_are_too_many(shared):
    for size in range(7):
        await lease_once(shared, variables={"SIZE": str(size)})
    assert [servers.closed for servers in FakeServers.made] == [True, True] + [False] * 5


async def test_idle_servers_that_are_leased_while_others_stop_stay(shared, monkeypatch):
    leases = []

    async def close(self):  # while the first servers close, the second ones are leased
        if not self.closed:
            self.closed = True
            if not leases:
                leases.append(await shared.lease(request_of(variables={"SIZE": "1"})))

    for size in range(5):
        await lease_once(shared, variables={"SIZE": str(size)})
    monkeypatch.setattr(leased_module, "MAX_IDLE", 1)
    monkeypatch.setattr(FakeServers, "close", close)
    await lease_once(shared, variables={"SIZE": "another"})
    assert leases[0].servers.urls == ["http://server/1"]
    assert not FakeServers.made[1].closed


async def test_a_start_that_fails_is_told(shared, monkeypatch):
    async def fail(self):
        raise HostError("no such program")

    monkeypatch.setattr(FakeServers, "start", fail)
    with pytest.raises(HostError, match="no such program"):
        await shared.lease(request_of())


# --- search and watch --------------------------------------------------------------------------


def search_of(sweep: SweepFolder, **changes):
    pytest.importorskip("optuna")
    from openenv_pipe.extras.sweeps.search import Search

    config = read_request(["sweep=search", "seed=1,2"]).sweep
    small = {"num_jobs": 4, "num_random": 1, "num_unpruned": 1, "prune_from_step": 1, "mean_of": 2}
    config = config.model_copy(update=small | changes)
    lr = Parameter(key="trainer.optimizer.lr", kind="real", values=(1e-4, 1e-2), log=True)
    sweep.write(jobs=[])
    return Search(sweep, config, [lr])


def records(*rewards: float) -> list[dict]:
    return [
        {"stage": "grpo", "step": step, "reward/mean": reward}
        for step, reward in enumerate(rewards, 1)
    ]


def play(search, sweep: SweepFolder, job, *rewards: float) -> None:
    """Do what a job's run and the sweep's watch do together."""
    run = begin_run(sweep, job.index)
    append(run, *records(*rewards))
    search.see(sweep.refresh(job.index), records(*rewards))
    stopped = stop_mark(sweep.path, job.index).exists()
    run.finish("interrupted" if stopped else "finished")
    sweep.refresh(job.index)
    search.conclude(sweep.record.jobs[job.index])


def test_a_search_proposes_within_bounds_and_stops_the_hopeless(sweep, tmp_path):
    search = search_of(sweep)
    shared = ["conf=echo", f"runs_dir={tmp_path}"]
    (first,) = search.propose(shared)
    play(search, sweep, first, 0.2, 0.4, 0.6)
    (second,) = search.propose(shared)
    play(search, sweep, second, 0.1, 0.1, 0.1)
    (third,) = search.propose(shared)
    play(search, sweep, third, 0.5, 0.7, 0.9)
    first, second, third = sweep.record.jobs
    assert [job.status for job in sweep.record.jobs] == ["finished", "pruned", "finished"]
    assert first.value == pytest.approx(0.5)  # the mean of the last two steps
    values = [float(job.overrides[-1].partition("=")[2]) for job in sweep.record.jobs]
    assert all(1e-4 <= value <= 1e-2 for value in values)
    assert len(set(values)) == 3
    assert search.best() == third
    assert len(search.propose(shared)) == 1
    assert search.propose(shared) == []


def test_a_search_by_a_metric_that_no_job_has_ends_and_names_the_closest(sweep, tmp_path):
    search = search_of(sweep, metric="reward/maen")
    (job,) = search.propose(["conf=echo", f"runs_dir={tmp_path}"])
    message = "sweep.metric=reward/maen: no step of echo/0001 .* such as reward/mean, step "
    with pytest.raises(ConfigError, match=message):
        play(search, sweep, job, 0.2, 0.4)
    sweep.change_job(job.index, value=0.5)  # one with other settings has had it
    search.conclude(sweep.record.jobs[job.index])


def test_nothing_is_stopped_without_pruning(sweep, tmp_path):
    search = search_of(sweep, prune=False)
    for rewards in ((0.9, 0.9), (0.1, 0.1)):
        (job,) = search.propose(["conf=echo", f"runs_dir={tmp_path}"])
        play(search, sweep, job, *rewards)
    assert [job.status for job in sweep.record.jobs] == ["finished", "finished"]


def test_a_stopped_job_of_a_search_is_tried_again_with_its_values(sweep, tmp_path):
    search = search_of(sweep)
    (job,) = search.propose(["conf=echo", f"runs_dir={tmp_path}"])
    begin_run(sweep, 0).finish("interrupted")
    sweep.end("interrupted")
    again = SweepFolder.open(sweep.path)
    again.resume()
    from openenv_pipe.extras.sweeps.search import Search

    search = Search(again, search._config, search._parameters)
    search.try_again(again.record.jobs[0])
    assert again.record.jobs[0].overrides == job.overrides
    assert again.record.jobs[0].trial != job.trial
    play(search, again, again.record.jobs[0], 0.3, 0.5)
    assert again.record.jobs[0].value == pytest.approx(0.4)


def test_a_search_that_goes_on_knows_what_ended_while_nobody_looked(sweep, tmp_path, monkeypatch):
    search = search_of(sweep, at_a_time=3, num_jobs=3)
    finished, failed, _ = search.propose(["conf=echo", f"runs_dir={tmp_path}"])
    run = begin_run(sweep, finished.index)
    append(run, *records(0.3, 0.5))
    run.finish("finished")
    begin_run(sweep, failed.index).finish("failed", cause="it broke")
    begin_run(sweep, 2).finish("interrupted")
    sweep.end("interrupted")  # as if the sweep's process had been killed
    again = SweepFolder.open(sweep.path)
    again.resume()

    def finish(folder, request, worker, watch, batch):
        for job in batch:
            folder.change_job(job.index, status="failed")

    stream = io.StringIO()
    monkeypatch.setattr(sweep_command, "_launch", finish)
    lr = "trainer.optimizer.lr=tag(log,interval(1e-4,1e-2))"
    request = read_request(["sweep=search", "sweep.num_jobs=3", "sweep.mean_of=2", lr])
    sweep_command._search(again, request, None, SweepTable(stream))
    assert again.record.jobs[0].value == pytest.approx(0.4)
    assert stream.getvalue().startswith("best: job 0")
    states = [trial.state.name for trial in search._study.get_trials()]
    assert states == ["COMPLETE", "FAIL", "FAIL", "FAIL"]  # the third job had two trials


def test_the_watch_tells_each_change_once(sweep):
    stream = io.StringIO()
    watch = Watch(sweep, SweepTable(stream))
    watch.look()
    run = begin_run(sweep, 0)
    watch.look()
    append(run, {"stage": "grpo", "step": 3, "reward/mean": 0.25})
    watch.look()
    run.finish("finished")
    watch.look()
    watch.look()
    assert stream.getvalue().splitlines() == [
        f"job 0 running {run.record.id} seed=0",
        f"job 0 finished {run.record.id} grpo 3 reward 0.250 seed=0",
    ]
    written = json.loads((sweep.path / "sweep.json").read_text())
    assert [job["status"] for job in written["jobs"]] == ["finished", "waiting"]


def test_the_table_has_the_last_step_of_jobs_that_ended_before(sweep):
    run = begin_run(sweep, 0)
    append(run, {"stage": "grpo", "step": 3, "reward/mean": 0.25})
    run.finish("finished")
    sweep.refresh(0)
    shown = [[str(cell) for cell in row] for row in Watch(sweep, SweepTable()).table().rows]
    assert shown[0][4] == "grpo 3 reward 0.250"
    assert shown[1][4] == ""
    shutil.rmtree(run.path)
    assert str(Watch(sweep, SweepTable()).table().rows[0][4]) == ""
