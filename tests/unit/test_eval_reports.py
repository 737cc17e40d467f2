"""Evaluation reports: made, saved, read and compared; the list of runs, and transcripts."""

from dataclasses import replace
from io import StringIO
from random import Random

import pytest
import run_samples
from rich.console import Console
from run_samples import eval_episodes, save

from openenv_pipe.errors import RunFolderError, UserError
from openenv_pipe.reports.runs_table import list_runs, runs_table
from openenv_pipe.runs.eval_difference import compare_reports
from openenv_pipe.runs.evals import (
    during_by_name,
    read_during,
    read_report,
    read_reports,
    read_stages,
)
from openenv_pipe.runs.transcript import headline, transcript, whole_transcript
from openenv_pipe.system.untrusted_text import code_block
from openenv_pipe.types import Status, Step


@pytest.fixture
def folder(tmp_path):
    return run_samples.create(tmp_path)


def _summary(folder, label, episodes):
    return run_samples.evaluation(folder, label, episodes).report


def test_failed_episodes_are_counted_and_not_scored(folder):
    episodes = eval_episodes()
    episodes[0].status = Status.ERROR
    report = _summary(folder, "start", episodes)
    assert (report.num_tasks, report.num_failed) == (4, 1)
    assert report.statuses == {"done": 7, "error": 1}
    assert report.success.mean == 1.0
    assert [task.task for task in report.tasks] == ["eval/0", "eval/1", "eval/2", "eval/3"]
    assert [len(task.rewards) for task in report.tasks] == [2, 2, 2, 1]


def test_a_report_of_failed_episodes_only_has_no_numbers(folder):
    episodes = eval_episodes()
    for episode in episodes:
        episode.status = Status.ERROR
    report = _summary(folder, "start", episodes)
    assert report.success is None and report.num_failed == 8
    assert compare_reports(report, report, folder.config_to_run().eval, 0).success is None


def test_reports_are_compared_task_by_task(folder):
    before = _summary(folder, "start", eval_episodes(success=False))
    after = _summary(folder, "trained", eval_episodes(num_tasks=3))
    change = compare_reports(before, after, folder.config_to_run().eval, 0)
    assert change.num_tasks == 3
    assert (change.success.mean, change.turns.mean) == (1.0, 0.0)


def test_reports_of_different_tasks_cannot_be_compared(folder):
    before = _summary(folder, "start", eval_episodes())
    moved = before.model_copy(
        update={"tasks": [t.model_copy(update={"task_seed": 0}) for t in before.tasks]}
    )
    with pytest.raises(UserError, match="no task in common"):
        compare_reports(before, moved, folder.config_to_run().eval, 0)


def test_saved_reports_come_back_and_none_is_overwritten(folder):
    path, first = save(folder, "trained", eval_episodes())
    assert save(folder, "trained", eval_episodes()) == (path, first)
    path, second = save(folder, "trained", eval_episodes(success=False), step=40)
    assert path.name == "trained_2.json"
    for label in ("baseline_random", "step_000010", "start_greedy", "start"):
        save(folder, label, eval_episodes())
    reports = read_reports(folder.path)
    stages, others = ["start", "start_greedy", "trained", "trained_2"], ["step_000010"]
    assert list(reports) == [*stages, *others, "baseline_random"]
    assert (reports["trained"], reports["trained_2"]) == (first, second)
    assert read_stages(folder.path) == {"start": reports["start"], "trained": second}


def test_reports_during_training_are_a_series_of_their_own(folder):
    for step in (20, 10):
        save(folder, f"during_{step:06d}", eval_episodes(), step)
    _, again = save(folder, "during_000010", eval_episodes(success=False), 10)
    save(folder, "during_000010.echo", eval_episodes(), 10)
    assert [report.step for report in read_during(folder.path)] == [10, 20]
    names = ["during_000010_2", "during_000010.echo", "during_000020"]
    assert [*during_by_name(folder.path)] == names
    assert read_during(folder.path)[0] == again
    assert read_reports(folder.path) == {}


def test_samples_of_a_task_give_pass_at_k(folder):
    """By hand: for a task solved in 1 of 4 samples, pass@2 is 1 - C(3,2)/C(4,2) = 1/2."""
    random = Random(0)
    episodes = [
        run_samples.episode(random, index, member, success=(index, member) == (0, 1))
        for index in range(2)
        for member in range(4)
    ]
    report = _summary(folder, "trained", episodes)
    assert {k: found.mean for k, found in report.pass_at.items()} == {2: 0.25, 4: 0.5}
    episodes[0].status = Status.ERROR  # leaves three samples of the first task
    assert {*_summary(folder, "trained", episodes).pass_at} == {2}


def test_tasks_reset_with_other_keywords_are_not_the_same(folder):
    there = eval_episodes()
    for episode in there:
        episode.task = replace(episode.task, reset={"words": "others"})
    with pytest.raises(UserError, match="no task in common"):
        compare_reports(
            _summary(folder, "start", eval_episodes()),
            _summary(folder, "trained", there),
            folder.config_to_run().eval,
            0,
        )


def test_a_damaged_report_is_a_user_error(folder):
    (folder.path / "eval" / "start.json").write_text("{}")
    with pytest.raises(RunFolderError, match="not an eval report"):
        read_report(folder.path / "eval" / "start.json")


def test_a_transcript_cuts_long_replies_and_survives_backticks():
    episode = run_samples.episode(Random(0), 0, 0, True, num_turns=2)
    episode.turns[0].reply = "a" * 5000
    episode.turns[1].reply, episode.turns[1].unusable = "```rm```\x1b[2J\ud800", "no guess"
    text = transcript(episode)
    assert "```rm```\\u001b[2J\\ud800" in text
    assert len(text) < 1500 and "4400 characters" in text and "unusable: no guess" in text
    assert code_block(text).startswith("````text\n") and code_block(text).endswith("\n````")


def test_a_transcript_shows_each_change_whatever_the_value():
    first = {"lives": 1, "alive": True, "text": "a wolf", "level": 0, "won": False, "bag": []}
    later = [
        {"lives": 0, "alive": False, "text": "", "level": False, "won": None, "bag": ["axe"]},
        {"lives": 0.0, "alive": False, "text": "", "level": 0, "won": None, "bag": []},
    ]
    episode = run_samples.episode(Random(0), 0, 0, True, num_turns=2)
    episode.first_observation = first
    for turn, observation in zip(episode.turns, later, strict=True):
        turn.steps = [Step(action={}, observation=observation)]
    shown = [line for line in transcript(episode).splitlines() if line.startswith("env")]
    assert shown == [
        "env    lives: 1  alive: true  text: a wolf  level: 0  won: false",
        'env    lives: 0  alive: false  text: ""  level: false  won: null  bag: ["axe"]'
        "  [reward 0]",
        "env    lives: 0.0  level: 0  bag: []  [reward 0]",
    ]


def test_an_episode_that_a_judge_left_without_a_reward_is_not_shown_with_one():
    episode = run_samples.episode(Random(0), 0, 0, True)
    episode.reward, episode.unscored = 0.0, "judge: the server answered 500"
    assert "success, no reward (" in headline(episode)
    assert transcript(episode).endswith("\nreward none: judge: the server answered 500")
    assert whole_transcript(episode).endswith("\n(no reward: judge: the server answered 500)")
    episode.status, episode.unscored = Status.ERROR, None
    assert "no reward" in headline(episode)


def test_the_list_says_of_what_a_reward_is_and_cuts_a_long_cause(tmp_path):
    trained = run_samples.create(tmp_path)
    run_samples.train(trained)
    trained.finish("failed", cause="why " * 50)
    measured = run_samples.create(tmp_path, purpose="evaluation")
    run_samples.evaluate(measured, "start", 0.2)
    reward = read_reports(measured.path)["start"].reward.mean
    console = Console(file=StringIO(), width=300)
    console.print(runs_table(list_runs([tmp_path])))
    titles, first, second = console.file.getvalue().splitlines()
    assert "reward (last step)" in titles
    assert f" {run_samples.record(2)['reward/mean']:.3f} " in first
    assert f" eval {reward:.3f}" in second
    assert first.count("why") == 20 and first.rstrip().endswith("…")


def test_runs_are_listed_and_a_broken_one_does_not_matter(tmp_path):
    done = run_samples.create(tmp_path)
    run_samples.train(done)
    run_samples.evaluate(done, "start", 0.2)
    run_samples.evaluate(done, "trained", 0.6, step=2)
    done.finish("finished")
    run_samples.create(tmp_path)
    for number, name in enumerate(("run.json", "config.json", "metrics.jsonl"), start=3):
        broken = run_samples.create(tmp_path)
        (broken.path / name).write_text("[]\n")
        assert broken.record.id == f"smoke/000{number}"
    (tmp_path / "smoke" / "0009").mkdir()
    (tmp_path / "notes").mkdir()
    rows = list_runs([tmp_path])
    assert [row.status for row in rows] == ["finished", "running"] + ["unreadable"] * 4
    first = rows[0]
    assert (first.id, first.step, first.num_steps) == ("smoke/0001", 2, 2)
    assert first.success == "20% → 60%"
    assert first.reward == pytest.approx(run_samples.record(2)["reward/mean"])
    console = Console(file=StringIO(), width=120)
    console.print(runs_table(rows))
    shown = console.file.getvalue()
    assert "20% → 60%" in shown and "smoke/0009" in shown


def test_an_evaluation_without_training_has_its_success_and_no_steps(tmp_path):
    run_samples.evaluate(run_samples.create(tmp_path, purpose="evaluation"), "scripted", 0.6)
    (row,) = list_runs([tmp_path])
    assert (row.num_steps, row.success) == (None, "60%") and row.reward is not None


def test_a_folder_without_runs_lists_none(tmp_path):
    assert list_runs([tmp_path / "missing"]) == []
