"""`train -m` as a user starts it: real jobs and servers, a failing job, a stop, and a resume."""

import contextlib
import json
import signal
from pathlib import Path

import psutil
import pytest

from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics, without_times
from tests.commands import Command, ended_by, run, servers_of, wait_until
from tests.integration.test_train import has_lines

TINY = (
    *("conf=echo", "device=cpu", "num_threads=1", "host.sessions_per_server=4", "eval.num_tasks=2"),
    *("trainer.tasks_per_step=1", "trainer.group_size=4"),
)
NUM_STEPS = 8
LONG = (f"trainer.steps={NUM_STEPS}", "seed=0,1")


def sweep_of(folder: Path) -> dict:
    (path,) = (folder / "runs" / "sweeps").glob("*/sweep.json")
    return {**json.loads(path.read_text()), "path": path.parent}


def runs_of(folder: Path) -> list[RunFolder]:
    sweep = sweep_of(folder)
    return [RunFolder.open(sweep["path"] / job["folder"]) for job in sweep["jobs"] if job["folder"]]


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """A sweep of three jobs that succeed and two that fail."""
    folder = tmp_path_factory.mktemp("swept")
    values = ("trainer.steps=2,two", "seed=0,1")
    code, out, err = run(folder, "train", "-m", *TINY, *values, "env.max_turns=4")
    assert code == 1, err
    assert "environment servers: started once, used 2 times" in err
    assert "job 2 failed" in err
    assert out.count("finished") == 2
    return folder


def test_a_bad_job_is_a_line_of_the_table(swept):
    sweep = sweep_of(swept)
    assert sweep["status"] == "failed"
    assert [job["status"] for job in sweep["jobs"]] == ["finished"] * 2 + ["failed"] * 2
    assert "expected a whole number" in sweep["jobs"][3]["cause"]
    assert [job["overrides"][-3:-1] for job in sweep["jobs"]][:2] == [
        ["trainer.steps=2", "seed=0"],
        ["trainer.steps=2", "seed=1"],
    ]


def test_all_jobs_had_the_same_server(swept):
    facts = [run_folder.record.facts for run_folder in runs_of(swept)]
    shared = [each["shared_servers"] for each in facts]
    assert [each["num_jobs_before"] for each in shared] == [0, 1]
    assert len({each["logs"] for each in shared}) == 1
    assert len({each["env_code"] for each in facts}) == 1
    assert len({run_folder.record.process for run_folder in runs_of(swept)}) == 1
    assert [path.name for path in (sweep_of(swept)["path"] / "servers/attempt_1").iterdir()] == [
        "environment_1"
    ]


def test_a_job_is_an_ordinary_run(swept, tmp_path):
    """The recorded command of the second job gives the same bytes when it is run alone, with its
    own server, and in a process that has run no other job."""
    job = runs_of(swept)[1]
    assert job.record.sweep == sweep_of(swept)["stamp"]
    assert job.written_config.host.type == "process"
    code, _, err = run(tmp_path, *job.record.command[1:])
    assert code == 0, err
    alone = RunFolder.open(tmp_path / "runs/echo/0001")
    ours, theirs = (
        [without_times(line) for line in each.metrics_path.read_text().splitlines()]
        for each in (job, alone)
    )
    assert ours == theirs
    names = ("checkpoints", "episodes", "eval")
    ours, theirs = ({name: files_of(each.path / name) for name in names} for each in (job, alone))
    assert ours == theirs
    assert all(ours.values())
    assert "shared_servers" not in alone.record.facts


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_dead_worker_is_replaced_and_ends_with_the_sweep(tmp_path):
    """The job of the killed worker fails, the next one goes on, and is stopped with the sweep."""
    process = Command(tmp_path, "train", "-m", *TINY, "seed=0,1", "trainer.steps=1000000")
    try:
        worker = worker_of_run(tmp_path, 1, process)
        worker.kill()
        replaced = worker_of_run(tmp_path, 2, process)
        assert replaced.pid != worker.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM, process.err
    finally:
        process.kill()
    assert [job["status"] for job in sweep_of(tmp_path)["jobs"]] == ["failed", "interrupted"]
    assert f"exit code {128 + signal.SIGKILL}" in sweep_of(tmp_path)["jobs"][0]["cause"]
    assert not replaced.is_running()
    assert servers_of(tmp_path) == []


def worker_of_run(folder: Path, number: int, process: Command) -> psutil.Process:
    """Wait for a step of a run, and return the run's process."""
    path = folder / f"runs/echo/{number:04d}"
    wait_until(lambda: has_lines(path / "metrics.jsonl", "grpo", 1), "a step", process)
    return psutil.Process(RunFolder.open(path).record.process.pid)


def test_a_stopped_sweep_goes_on_where_it_was(tmp_path):
    """The sweep is first stopped by SIGTERM, then killed after a resume, and at last runs to its
    end."""
    metrics = tmp_path / "runs/echo/0001/metrics.jsonl"
    process = Command(tmp_path, "train", "-m", *TINY, *LONG)
    code = ended_by(signal.SIGTERM, process, lambda: has_lines(metrics, "grpo", 2), "two steps")
    sweep, err = sweep_of(tmp_path), process.err
    assert code == 128 + signal.SIGTERM, err
    assert f"train -m --resume runs/sweeps/{sweep['stamp']}" in err
    assert sweep["status"] == "interrupted"
    num_begun = len(read_metrics(metrics))
    assert 2 <= num_begun < NUM_STEPS, err

    process = Command(tmp_path, "train", "-m", "--resume", str(sweep["path"]))
    try:
        wait_until(lambda: has_lines(metrics, "grpo", num_begun + 1), "another step", process)
    finally:
        process.kill()
    # When a sweep is killed, its runs are asked to stop, and they save.
    wait_until(lambda: servers_of(tmp_path) == [], "the end of all processes")
    assert [record["step"] for record in read_metrics(metrics)][num_begun] == num_begun + 1

    code, _, err = run(tmp_path, "train", "-m", "--resume", "latest")
    assert code == 0, err
    assert [job["status"] for job in sweep_of(tmp_path)["jobs"]] == ["finished", "finished"]
    assert [run_folder.record.id for run_folder in runs_of(tmp_path)] == ["echo/0001", "echo/0002"]
    for run_folder in runs_of(tmp_path):
        steps = [record["step"] for record in read_metrics(run_folder.metrics_path)]
        assert steps == [*range(1, NUM_STEPS + 1)]


def test_a_dead_server_is_started_again_for_the_job_that_has_it(tmp_path):
    process = Command(tmp_path, "train", "-m", *TINY, "trainer.steps=15", "seed=0")
    try:
        metrics = tmp_path / "runs/echo/0001/metrics.jsonl"
        wait_until(lambda: has_lines(metrics, "grpo", 1), "a step", process)
        (server,) = env_servers_of(process.pid)
        server.kill()
        _, err = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert servers_of(tmp_path) == []


def env_servers_of(pid: int) -> list[psutil.Process]:
    """Return the environment servers below a process, without their guardians."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process has just ended
            text = " ".join(child.cmdline())
            if "serve_package.py" in text and "guard.py" not in text:
                found.append(child)
    return found
