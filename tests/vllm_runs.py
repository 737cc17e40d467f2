"""Starts `train` with engine=vllm for the tests, and checks the results."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from openenv_pipe.runs.episodes import read_episodes
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from tests.vllm_server import SMALL

REPOSITORY = Path(__file__).parents[1]
LIMIT_S = 600.0  # a start takes 20 to 30 s on two idle cores, and minutes on busy ones
BOUND = 1e-4  # for a difference of logprobs, in float32


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "openenv_pipe.cli.main", "train", *SMALL, *overrides]
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
    """Wait for a run and return its exit code and stderr."""
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
    """Return the run's child processes whose command line names vLLM."""
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
    """Assert three steps, and after each the same, changed policy in server and trainer."""
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
