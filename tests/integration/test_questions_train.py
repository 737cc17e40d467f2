"""Train on a file of questions, and find a wrong scoring function, as a user would."""

import json

import pytest

from openenv_pipe.commands.findings import Result
from openenv_pipe.extras.lab.check import probe_environment, sessions
from openenv_pipe.extras.lab.targets import find_target
from openenv_pipe.runs.episodes import read_episodes
from tests.commands import run

EXPERIMENT = """# @package _global_
defaults: [override /env: questions, override /trainer: dapo, _self_]
name: sums
env: {variables: {QUESTIONS_SCORE: number}, tasks: {train: {path: sums.jsonl}}}
eval: {num_tasks: 4}
"""
SCORES = """
def even_is_wrong(answer, row):
    return float(answer == str(row["answer"]) and row["answer"] % 2)
def all_are_right(answer, row):
    return 1
"""
SECRET = 1_000_000  # no answer occurs in a question


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rows = ({"question": f"{n} + a million =", "answer": SECRET + n} for n in range(95, 135))
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_scores.py").write_text(SCORES)
    (tmp_path / "conf/conf").mkdir(parents=True)
    (tmp_path / "conf/conf/sums.yaml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_five_lines_train_on_a_file_and_the_model_never_sees_an_answer(folder):
    code, _, err = run(
        folder,
        "train",
        "conf=sums",
        *("trainer.steps=2", "trainer.tasks_per_step=4", "trainer.group_size=2"),
        *("trainer.max_sampling_rounds=1", "host.sessions_per_server=8"),
    )
    assert code == 0, err
    groups = [
        group
        for path in sorted((folder / "runs/sums/0001/episodes").glob("step_*.jsonl.gz"))
        for group in read_episodes(path)
    ]
    assert len(groups) == 8
    for group in groups:
        answer = str(group.task.reset["answer"])
        assert int(answer) >= SECRET
        for episode in group.episodes:
            assert episode.status == "done"
            assert episode.first_observation["question"] == group.task.reset["question"]
            assert answer not in json.dumps(episode.observations)


@pytest.mark.parametrize(
    ("score", "own", "wrong"),
    [
        ("number", Result.OK, Result.OK),
        ("my_scores:even_is_wrong", Result.FAIL, Result.OK),
        ("my_scores:all_are_right", Result.OK, Result.FAIL),
    ],
)
def test_env_check_finds_a_function_that_scores_wrongly(folder, monkeypatch, score, own, wrong):
    monkeypatch.setattr(sessions, "SPEED_LIMIT_S", 0.2)
    found = find_target("conf=sums", [f"env.variables.QUESTIONS_SCORE={score}"])
    lines = probe_environment(found, policy=None, num_episodes=20, notify=lambda _: None)
    results = {line.name: line for line in lines}
    assert (results["own answers"].result, results["wrong answers"].result) == (own, wrong)
    assert results["own answers"].measured == {"tasks": 40, "full": 40 if own is Result.OK else 20}
    assert results["leaks"].text.startswith("not tested: the end of ")
