"""`reproduce`: the same code in another folder gives the same bytes, a changed constant does
not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 300.0
RUN = (
    "conf=smoke",
    "device=cpu",
    "num_threads=1",
    "eval.baselines=false",
    "trainer.tasks_per_step=3",
    "trainer.replay={coef: 0.5, size: 4, min_reward: null, per_step: 2}",
)


def pipe(code: Path, folder: Path, *arguments: str) -> tuple[int, str]:
    """Run a command with the code of one folder in another folder; return exit code and output."""
    done = subprocess.run(
        [sys.executable, "-m", "openenv_pipe.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(code), "OMP_WAIT_POLICY": "PASSIVE"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A recorded run, made by the commands."""
    folder = tmp_path_factory.mktemp("recorded")
    code, said = pipe(REPOSITORY, folder, "train", *RUN)
    assert code == 0, said
    code, said = pipe(REPOSITORY, folder, "reproduce", "latest", "--record", "recording")
    assert code == 0, said
    assert not list((folder / "recording").rglob("*.safetensors"))
    return folder / "recording"


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the code, like a fresh clone."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("openenv_pipe", "conf", "envs"):
        shutil.copytree(
            REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    return folder


def test_a_fresh_clone_elsewhere_gives_the_same_bytes(recorded, clone, tmp_path):
    code, said = pipe(clone, tmp_path, "reproduce", str(recorded))
    assert code == 0, said
    assert "byte for byte" in said
    assert "byte for byte" in (tmp_path / "runs/smoke/0001/reproduction.md").read_text()


def test_a_changed_environment_is_named_by_its_file_before_there_is_a_run(
    recorded, clone, tmp_path
):
    path = clone / "envs" / "wordle" / "server" / "app.py"
    text = path.read_text()
    path.write_text(f"{text}# other code\n")
    try:
        code, said = pipe(clone, tmp_path, "reproduce", str(recorded))
    finally:
        path.write_text(text)
    assert code == 2 and "code: env_files.server/app.py was " in said, said
    assert "env_code" not in said and "--allow code" in said
    assert not (tmp_path / "runs").exists()


def test_a_changed_constant_in_the_loss_is_found(recorded, clone, tmp_path):
    """Replay, which plays nothing, rejects the changed code; with --allow it finds the first
    changed step."""
    code, said = pipe(clone, tmp_path, "reproduce", str(recorded), "--replay", "--steps", "1")
    assert code == 0, said
    assert "grpo 1/1 " in said
    path = clone / "openenv_pipe" / "algorithms" / "losses" / "policy.py"
    text = path.read_text()
    assert "ratios(logprobs_N - old_logprobs_N)" in text
    path.write_text(text.replace("ratios(logprobs_N -", "1.001 * ratios(logprobs_N -"))
    try:
        code, said = pipe(clone, tmp_path, "reproduce", str(recorded), "--replay")
        assert code == 2 and "code: openenv_pipe" in said and "--allow code" in said
        allowed = ("--replay", "--allow", "code")
        code, said = pipe(clone, tmp_path, "reproduce", str(recorded), *allowed)
    finally:
        path.write_text(text)
    assert code == 3, said
    assert "different: grpo step 1: grad/norm was" in said


def test_a_run_that_was_extended_is_repeated_as_it_was_made(tmp_path):
    """The rate of the first step followed from the number of steps that were planned then."""
    schedule = "trainer.optimizer.schedule=linear"
    for words in (
        ("train", *RUN, "trainer.steps=2", schedule),
        ("train", "--resume", "latest", "trainer.steps=3"),
        ("reproduce", "smoke/0001"),
        ("reproduce", "smoke/0002", "--replay"),
    ):
        code, said = pipe(REPOSITORY, tmp_path, *words)
        assert code == 0, said


def test_a_run_that_stopped_itself_is_repeated_with_its_last_evaluations(tmp_path):
    stop = "eval.during={every: 1, stop: {measure: success, bound: mean, at: 0.0}}"
    for words in (("train", *RUN, "trainer.steps=3", stop), ("reproduce", "smoke/0001")):
        code, said = pipe(REPOSITORY, tmp_path, *words)
        assert code == 0, said
    evaluations = [
        {path.name: path.read_bytes() for path in (tmp_path / run / "eval").glob("*.json")}
        for run in ("runs/smoke/0001", "runs/smoke/0002")
    ]
    assert {"during_000001.json", "trained.json"} < {*evaluations[0]}
    assert evaluations[0] == evaluations[1]


def test_a_run_that_was_resumed_with_an_early_stop_is_not_stopped_before_that(tmp_path):
    stop = "eval.during.stop={measure: success, bound: mean, at: 0.0}"
    for words in (
        ("train", *RUN, "trainer.steps=3", "eval.during.every=2"),
        ("train", "--resume", "latest", "trainer.steps=5", stop),
        ("reproduce", "smoke/0001"),
    ):
        code, said = pipe(REPOSITORY, tmp_path, *words)
        assert code == 0, said
    assert "4 steps: the same, byte for byte" in said
