"""`train` and `eval` as a user starts them: real servers, real models, real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from openenv_pipe.hosts.package import code_digest
from openenv_pipe.resources import find_env
from openenv_pipe.runs.episodes import read_episodes
from openenv_pipe.runs.files import digest_of_folder
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics, without_times

LIMIT_S = 240.0
REPOSITORY = Path(__file__).parents[2]
SMALL = ("num_threads=1", "host.sessions_per_server=8", "device=cpu")


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "openenv_pipe.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "default"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr; nothing of it may be left running."""
    process = start(folder, *arguments)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert servers_of(folder) == []
    return process.returncode, out, err


def servers_of(folder: Path) -> list[psutil.Process]:
    """Environment servers whose output goes to a log below `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            paths = [
                process.cwd(),
                *(str(Path(f"/proc/{process.pid}/fd/{fd}").readlink()) for fd in (1, 2)),
            ]
        except (psutil.Error, OSError):
            continue
        if any(path.startswith(str(folder)) for path in paths) and process.pid != os.getpid():
            found.append(process)
    return found


def wait_until(condition, what: str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        time.sleep(0.05)


def has_lines(path: Path, stage: str, number: int) -> bool:
    return sum(record["stage"] == stage for record in read_metrics(path)) >= number


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Path:
    """The run folder of one `train conf=smoke`, started in an empty folder."""
    folder = tmp_path_factory.mktemp("smoke")
    code, _, err = run(folder, "train", "conf=smoke", *SMALL)
    assert code == 0, err
    return folder / "runs" / "smoke" / "0001"


def test_a_run_leaves_the_whole_proof(smoke):
    run_folder = RunFolder.open(smoke)
    assert run_folder.status == "finished"
    assert [path.name for path in run_folder.checkpoints()] == [f"step_{n:06d}" for n in range(3)]
    stages = [(record["stage"], record["step"]) for record in read_metrics(smoke / "metrics.jsonl")]
    assert stages == [("warm_start", 1), ("warm_start", 2), ("grpo", 1), ("grpo", 2)]
    assert {path.stem for path in (smoke / "eval").glob("*.json")} == {
        *("start", "warm_start", "trained", "baseline_expert", "baseline_random"),
    }
    assert (smoke / "report.md").read_text().startswith("# smoke/0001")
    assert (smoke / "plots" / "learning_curves.png").stat().st_size > 10_000
    assert (smoke.parent / "latest").resolve() == smoke.resolve()
    assert (smoke / "logs" / "latest" / "env-0.log").exists()
    groups = read_episodes(smoke / "episodes" / "step_000002.jsonl.gz")
    assert len({group.id for group in groups}) == len(groups) == 2
    turn = groups[0].episodes[0].turns[0]
    assert len(turn.completion_ids) == len(turn.logprobs) > 0
    assert {path.suffix for path in (smoke / "checkpoints").rglob("*") if path.is_file()} <= {
        *(".safetensors", ".json", ".jinja"),
    }


def test_every_metric_of_a_run_is_documented(smoke):
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    terms = {f"reward/{name}" for name in RunFolder.open(smoke).config.reward.terms}
    for record in read_metrics(smoke / "metrics.jsonl"):
        names = set(record) - {"stage", "step"} - terms
        assert {name for name in names if f"`{name}`" not in page} == set()


def test_the_same_command_gives_the_same_bytes(smoke, tmp_path):
    code, _, err = run(tmp_path, "train", "conf=smoke", *SMALL)
    assert code == 0, err
    again = tmp_path / "runs" / "smoke" / "0001"
    first, second = (
        [without_times(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (smoke, again)
    )
    assert first == second
    for name in ("step_000000", "step_000002"):
        assert digest_of_folder(smoke / "checkpoints" / name) == digest_of_folder(
            again / "checkpoints" / name
        )


def test_eval_of_a_run_gives_what_the_run_had(smoke):
    code, out, err = run(smoke.parents[2], "eval", "runs/smoke/latest")
    assert code == 0, err
    assert "step_000002" in out
    trained, again = (
        json.loads((smoke / "eval" / f"{name}.json").read_text())
        for name in ("trained", "step_000002")
    )
    assert trained["tasks"] == again["tasks"]


def test_eval_of_a_scripted_policy(tmp_path):
    policy = "engine.policy=wordle.policies:consistent"
    code, out, err = run(tmp_path, "eval", "conf=smoke", "engine=scripted", policy, *SMALL)
    assert code == 0, err
    report = json.loads((tmp_path / "runs/smoke/0001/eval/scripted.json").read_text())
    assert report["success"]["mean"] > 0.7
    assert "scripted" in out
    record = json.loads((tmp_path / "runs/smoke/0001/run.json").read_text())
    assert record["facts"]["env_code"] == code_digest(find_env("wordle"))


def test_an_adapter_is_trained_and_loaded_again(tmp_path):
    lora = ("model.lora.rank=4", "trainer.loss.kl.coef=0.1", "trainer.steps=1")
    code, _, err = run(tmp_path, "train", "conf=smoke", *lora, *SMALL)
    assert code == 0, err
    assert (tmp_path / "runs/smoke/0001/checkpoints/step_000001/adapter_model.safetensors").exists()
    code, _, err = run(tmp_path, "eval", "runs/smoke/0001")
    assert code == 0, err
    reports = tmp_path / "runs/smoke/0001/eval"
    trained, again = (
        json.loads((reports / f"{name}.json").read_text()) for name in ("trained", "step_000001")
    )
    assert trained["tasks"] == again["tasks"]


def test_a_model_of_a_folder_is_trained(smoke, tmp_path):
    path = smoke / "checkpoints" / "step_000002"
    model = ("model=hub", f"model.path={path}", "model.dtype=float32", "trainer.steps=1")
    limits = ("env.max_episode_tokens=400", "env.max_reply_tokens=6")
    code, _, err = run(tmp_path, "train", "conf=smoke", *model, *limits, *SMALL)
    assert code == 0, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_saved(tmp_path, number):
    process = start(tmp_path, "train", "conf=smoke", "trainer.steps=1000", *SMALL)
    metrics = tmp_path / "runs/smoke/0001/metrics.jsonl"
    try:
        wait_until(lambda: has_lines(metrics, "grpo", 2), "two steps")
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    assert servers_of(tmp_path) == []
    folder = RunFolder.open(tmp_path / "runs/smoke/latest")
    assert folder.status == "interrupted"
    last = read_metrics(metrics)[-1]["step"]
    assert folder.checkpoints()[-1].name == f"step_{last:06d}"
    assert "interrupted" in (folder.path / "report.md").read_text()


def test_a_killed_run_leaves_no_server_and_a_readable_folder(tmp_path):
    process = start(tmp_path, "train", "conf=smoke", "trainer.steps=1000", *SMALL)
    metrics = tmp_path / "runs/smoke/0001/metrics.jsonl"
    try:
        wait_until(lambda: has_lines(metrics, "grpo", 1), "a step")
        assert servers_of(tmp_path) != []
    finally:
        process.kill()
        process.communicate(timeout=60)
    wait_until(lambda: servers_of(tmp_path) == [], "the servers' end", limit_s=20)
    code, out, err = run(tmp_path, "runs")
    assert code == 0, err
    assert "died" in out
    code, _, err = run(tmp_path, "eval", "runs/smoke/latest")
    assert code == 0, err
