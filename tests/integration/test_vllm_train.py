"""`train` with engine=vllm as a user starts it: publishing, and a server's life and death."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from openenv_pipe.runs.episodes import read_episodes
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from tests.vllm_server import LORA_RANK, SMALL, installed_vllm

pytestmark = pytest.mark.vllm
REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 600.0  # a start takes 20 to 30 s on two idle cores, and minutes on busy ones
# Random replies win nothing; their vowels differ, so that there is something to learn from.
VOWELS = "+reward.terms.vowels={type: regex, pattern: '[aeiou]', weight: 1.0, per_turn: false}"
BOUND = 1e-4  # of a logprob, in float32


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "openenv_pipe.cli", "train", *SMALL, VOWELS, *overrides]
    with (folder / "stderr").open("w") as log:
        return subprocess.Popen(
            [*command, "eval.num_tasks=2", "trainer.optimizer.lr=1e-2"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.DEVNULL,
            stderr=log,
            text=True,
        )


def ended(process: subprocess.Popen[str], folder: Path) -> tuple[int, str]:
    """Exit code and stderr of a run."""
    try:
        code = process.wait(LIMIT_S)
    finally:
        process.kill()
    return code, (folder / "stderr").read_text()


def wait_until(condition, what: str, folder: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        told = (folder / "stderr").read_text()
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s for {what}\n{told}"
        time.sleep(0.02)


def server_processes(run: psutil.Process) -> list[psutil.Process]:
    """The server and all that it started, by the environment that they run in."""
    found = []
    for process in run.children(recursive=True):
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "vllm" in words.lower():
            found.append(process)
    return found


def steps_of(folder: Path) -> list[dict]:
    path = folder / "runs" / "smoke" / "0001" / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def assert_trained_and_agreed(folder: Path) -> None:
    """Three steps, after each of which server and trainer had the same, new policy."""
    steps = steps_of(folder)
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        assert record["groups/trained"] > 0
        assert record["canary/difference"] < BOUND < record["canary/moved"]
        assert record["mismatch/max"] < BOUND
    run = RunFolder.open(folder / "runs" / "smoke" / "0001")
    for step in (1, 2, 3):
        groups = read_episodes(run.path / "episodes" / f"step_{step:06d}.jsonl.gz")
        turns = [turn for group in groups for e in group.episodes for turn in e.turns]
        assert {version for turn in turns for version in turn.policy_versions} == {step - 1}


def test_three_steps_with_an_adapter(vllm_served, tmp_path):
    process = start(tmp_path, *vllm_served.attach, f"model.lora.rank={LORA_RANK}")
    code, told = ended(process, tmp_path)
    assert code == 0, told
    assert_trained_and_agreed(tmp_path)


@pytest.fixture
def installed() -> None:
    if isinstance(found := installed_vllm(), str):
        pytest.skip(found)


def test_a_server_killed_in_a_step_is_replaced(installed, tmp_path):
    """Three steps with all weights on a server of the run's own, which is killed in the second:
    the next one gets the policy of the first step, and the requests that were lost. Trap 28."""
    process = start(tmp_path, "trainer.group_size=16", "host.sessions_per_server=32")
    try:
        wait_until(lambda: steps_of(tmp_path), "the first step", tmp_path)
        time.sleep(0.1)
        (worker,) = (
            each
            for each in server_processes(psutil.Process(process.pid))
            if each.cmdline()[0].startswith("VLLM::Worker")
        )
        worker.kill()
    finally:
        code, told = ended(process, tmp_path)
    assert code == 0, told
    assert_trained_and_agreed(tmp_path)
    assert [record["engine/restarts"] for record in steps_of(tmp_path)] == [0, 1, 1]
    assert "restart 1 of 2" in told
    assert "loading weights" in told  # what a start is at


def test_a_killed_trainer_leaves_no_server(installed, tmp_path):
    process = start(tmp_path, f"model.lora.rank={LORA_RANK}", "trainer.steps=1000")
    try:
        wait_until(lambda: steps_of(tmp_path), "the first step", tmp_path)
        servers = server_processes(psutil.Process(process.pid))
        assert len(servers) >= 3  # the server, its engine, its worker
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        _, alive = psutil.wait_procs(servers, timeout=5)
        assert alive == []
    finally:
        process.kill()
