"""`train` and `eval` as a user starts them, with real servers, models and processes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openenv_pipe.environments.hosts.package import code_digest
from openenv_pipe.runs.episodes import read_episodes
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.system.files import digest_of_file
from openenv_pipe.system.resources import find_env
from tests.commands import REPOSITORY, SMALL, Command, ended_by, run, servers_of, wait_until


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


def test_each_step_changes_the_weights(smoke):
    """Checkpoints that are all equal would prove nothing in tests of resumed runs."""
    files = sorted(smoke.glob("checkpoints/step_*/model.safetensors"))
    assert len(files) == len({digest_of_file(file) for file in files}) == 3


def test_every_metric_of_a_run_is_documented(smoke):
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    terms = {f"reward/{name}" for name in RunFolder.open(smoke).written_config.reward.terms}
    for record in read_metrics(smoke / "metrics.jsonl"):
        names = set(record) - {"stage", "step"} - terms
        assert {name for name in names if f"`{name}`" not in page} == set()


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


FIRST_COMMANDS = f"""
from openenv_pipe.cli.main import main
fewer = ["trainer.steps=1", "trainer.warm_start.steps=1", "eval.num_tasks=2", *{SMALL}]
for words in (
    ["train", "conf=smoke", *fewer],
    ["eval", "latest", "eval.num_tasks=2", *{SMALL}],
    ["view", "latest", "--bundle", "pages"],
    ["env", "new", "odd_letters"],
    ["env", "check", "odd_letters", "--episodes", "20"],
):
    try:
        main(words)
    except SystemExit as ended:
        assert ended.code == 0, words
"""


def test_the_first_commands_print_no_warning_of_a_library(tmp_path):
    """In a process of its own, with the filters of Python that a user has."""
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    variables.pop("PYTHONWARNINGS", None)
    done = subprocess.run(
        [sys.executable, "-c", FIRST_COMMANDS],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert "runs/smoke/0001" in printed and "odd_letters" in printed
    assert re.findall(r".*(?:Warning\b|warnings?\.warn|\bWARN).*", printed) == []


def test_an_adapter_is_trained_and_loaded_again(adapter_run):
    assert (adapter_run / "checkpoints/step_000001/adapter_model.safetensors").exists()
    code, _, err = run(adapter_run.parents[2], "eval", "runs/smoke/0001")
    assert code == 0, err
    trained, again = (
        json.loads((adapter_run / "eval" / f"{name}.json").read_text())
        for name in ("trained", "step_000001")
    )
    assert trained["tasks"] == again["tasks"]


def test_a_model_of_a_folder_is_trained(smoke, tmp_path):
    path = smoke / "checkpoints" / "step_000002"
    model = ("model=hub", f"model.path={path}", "model.dtype=float32", "trainer.steps=1")
    limits = ("env.max_episode_tokens=400", "env.max_reply_tokens=6")
    code, _, err = run(tmp_path, "train", "conf=smoke", *model, *limits, *SMALL)
    assert code == 0, err


def test_an_interrupted_run_is_saved(tmp_path):
    """This test interrupts with SIGTERM; test_resume.py interrupts with Ctrl-C."""
    process = Command(tmp_path, "train", "conf=smoke", "trainer.steps=1000", *SMALL)
    metrics = tmp_path / "runs/smoke/0001/metrics.jsonl"
    code = ended_by(signal.SIGTERM, process, lambda: has_lines(metrics, "grpo", 2), "two steps")
    assert code == 128 + signal.SIGTERM, process.err
    assert "Traceback" not in process.err
    assert servers_of(tmp_path) == []
    folder = RunFolder.open(tmp_path / "runs/smoke/latest")
    assert folder.status == "interrupted"
    last = read_metrics(metrics)[-1]["step"]
    assert folder.checkpoints()[-1].name == f"step_{last:06d}"
    assert "interrupted" in (folder.path / "report.md").read_text()


def test_a_killed_run_leaves_no_server_and_a_readable_folder(tmp_path):
    process = Command(tmp_path, "train", "conf=smoke", "trainer.steps=1000", *SMALL)
    metrics = tmp_path / "runs/smoke/0001/metrics.jsonl"
    try:
        wait_until(lambda: has_lines(metrics, "grpo", 1), "a step", process)
        assert servers_of(tmp_path) != []
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: servers_of(tmp_path) == [], "the servers' end")
    code, out, err = run(tmp_path, "runs")
    assert code == 0, err
    assert "died" in out
    code, _, err = run(tmp_path, "eval", "runs/smoke/latest")
    assert code == 0, err
