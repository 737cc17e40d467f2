"""Training by the Python API: in threads and event loops, stopped by callbacks and interrupts."""

import asyncio
import signal
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from openenv_pipe import evaluate, export, open_run, reproduce, train
from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.checkpoints import all_checkpoints
from tests.crash_matrix import Result

SMALL = (
    *("trainer.steps=3", "trainer.tasks_per_step=1", "trainer.group_size=2"),
    *("trainer.checkpoint.every=2", "eval.num_tasks=2", "eval.baselines=false"),
)


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_in_a_thread_with_a_running_loop_a_callback_stops_and_a_resume_goes_on():
    """The resumed run equals an uninterrupted one, with which `reproduce` compares it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    lines, seen, runs = [], [], []

    def on_step(run, metrics):
        seen.append((run.status, len(run.metrics), metrics["step"], threading.current_thread()))
        return "two are enough" if metrics["step"] == 2 else None

    async def notebook():
        runs.append(train("conf=echo", *SMALL, callbacks=[on_step], on_progress=lines.append))

    thread = threading.Thread(target=lambda: asyncio.run(notebook()))
    thread.start()
    thread.join()
    (run,) = runs
    assert [each[:3] for each in seen] == [("running", 1, 1), ("running", 2, 2)]
    assert thread not in [each[3] for each in seen]
    assert run.status == "finished"
    assert run.cause == "stopped by a callback after grpo step 2: two are enough"
    assert run.cause in lines and run.cause in run.report.read_text()
    assert run.evals["trained"].step == 2
    assert run.checkpoint().name == "step_000002"

    resumed = train(resume=run)
    assert (resumed.path, resumed.status, resumed.cause) == (run.path, "finished", None)
    assert [record["step"] for record in resumed.metrics] == [1, 2, 3]
    assert {len(group.episodes) for step in (1, 2, 3) for group in run.episodes(step)} == {2}
    assert run.load_policy(3, device="cpu").num_parameters > 0
    same = reproduce(run)
    assert (same.is_same, same.is_exact, same.num_steps, same.first_difference) == (
        *(True, True, 3),
        None,
    )
    reports = evaluate(run, "eval.num_tasks=1")
    assert list(reports) == [run.id]
    start = f"{run.path}@start"
    both = evaluate(start, run.id, "eval.num_tasks=1")
    assert (list(both), list(both.differences)) == ([start, run.id], [run.id])
    folder = export(f"{run.path}@2", "model", on_progress=lines.append)
    assert (folder / "config.json").is_file() and lines[-1].startswith("read back: logprobs")
    assert open_run("latest").id == run.id != open_run(same.path).id
    assert handlers == {number: signal.getsignal(number) for number in handlers}


def test_the_start_of_a_run_is_loaded_exported_and_forked():
    run = train("conf=echo", *SMALL, "trainer.steps=1")
    before, after = (
        [each.detach() for each in run.load_policy(which, device="cpu").model.parameters()]
        for which in ("start", "last")
    )
    assert not all(map(torch.equal, before, after))
    with pytest.raises(RunFolderError, match=r"load_policy\('start'\) loads it"):
        run.checkpoint("start")
    exported = export(f"{run.path}@start", "model")
    assert "The model, before training, of a run" in (exported / "README.md").read_text()
    weights = AutoModelForCausalLM.from_pretrained(exported).parameters()
    assert all(map(torch.equal, weights, before))
    fork = train(fork=f"{run.path}@start")
    assert Result.of(fork.path).difference(Result.of(run.path)) is None
    other = train("model.seed=5", fork=f"{fork.path}@start")
    assert other.status == "finished" and reproduce(fork).is_same


def test_checkpoints_by_time_are_replaced():
    """One is due after each step. The regular ones are those of steps 3 and 4.

    They change nothing: test_resume.py compares a run that has them with one that has none.
    """
    steps = ("trainer.checkpoint.every=3", "trainer.steps=4", "trainer.checkpoint.best=null")
    saved = []

    def on_step(run, metrics):
        saved.append([path.name for path in all_checkpoints(run.path)])

    timed = ("trainer.checkpoint.every_minutes=1e-9", *steps)
    train("conf=echo", *SMALL, *timed, callbacks=[on_step])
    first, third, last = (f"step_00000{step}" for step in (1, 3, 4))
    assert saved == [[], [first], [third], [third, last]]


def test_an_interrupt_saves_the_run_and_a_fork_may_start_from_it():
    """KeyboardInterrupt in the main thread, as a notebook's stop button raises it."""

    def interrupt(run, metrics):
        if metrics["step"] == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as raised:
        train("conf=echo", *SMALL, "trainer.steps=1000", callbacks=[interrupt])
    run = open_run("latest")
    assert str(raised.value) == (
        f'echo/0001 was interrupted; to continue: train(resume="{run.path}")'
    )
    assert (run.status, run.cause) == ("interrupted", "interrupted")
    assert run.checkpoint().name == f"step_{len(run.metrics):06d}"
    steps = len(run.metrics) + 1
    forked = train(f"trainer.steps={steps}", fork=run)
    assert (forked.id, forked.status) == ("echo/0002", "finished")
    assert [record["step"] for record in forked.metrics] == [steps]


def test_a_second_interrupt_gives_up_saving():
    lines = []

    def interrupt_twice(run, metrics):
        for told in ("stopping and saving; repeat to stop without saving", "stopping without sav"):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            deadline = time.monotonic() + 20
            while not any(told in line for line in lines) and time.monotonic() < deadline:
                time.sleep(0.01)

    words = ("conf=echo", *SMALL, "trainer.steps=1000")
    with pytest.raises(KeyboardInterrupt):
        train(*words, callbacks=[interrupt_twice], on_progress=lines.append)
    assert [line for line in lines if "stopping" in line][1:] == ["stopping without saving"]
    run = open_run("latest")
    assert (run.status, len(run.metrics)) == ("interrupted", 1)
    assert all_checkpoints(run.path) == []


def test_a_callback_may_stop_the_warm_start_which_a_resume_finishes():
    def on_step(run, metrics):
        return "seen it" if metrics["stage"] == "warm_start" else None

    run = train("conf=smoke", *SMALL, "trainer.steps=1", callbacks=[on_step])
    assert run.cause == "stopped by a callback after warm_start step 1: seen it"
    assert run.checkpoint().name == "warm_start_000001"
    assert run.evals["trained"].step == 0
    run = train(resume=run.path)
    records = [(record["stage"], record["step"]) for record in run.metrics]
    assert records == [("warm_start", 1), ("warm_start", 2), ("grpo", 1)]
    assert reproduce(run).is_same


def test_a_callback_that_raises_makes_the_run_fail_and_it_may_be_resumed():
    def on_step(run, metrics):
        raise LookupError("no such metric")

    with pytest.raises(LookupError, match="no such metric"):
        train("conf=echo", *SMALL, "trainer.steps=1", callbacks=[on_step])
    run = open_run("latest")
    assert (run.status, run.cause) == ("failed", "LookupError: no such metric")
    assert train(resume=run).status == "finished"
