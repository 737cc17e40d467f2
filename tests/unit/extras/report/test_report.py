"""report.md with its plots, and the page of an evaluation."""

import json
import math
import re
import subprocess
from dataclasses import replace
from io import StringIO
from random import Random

import numpy
import pytest
import run_samples
from rich.console import Console
from run_samples import eval_episodes, save

from openenv_pipe.config.compose import amend, compose
from openenv_pipe.extras.report.plots import draw_learning_curves, draw_losses, smooth
from openenv_pipe.extras.report.run_report import write_report
from openenv_pipe.extras.report.sections import signal_text
from openenv_pipe.reports.runs_table import list_runs, runs_table
from openenv_pipe.reports.unscored import METRIC
from openenv_pipe.runs.episodes import episodes_path, read_episodes, write_episodes
from openenv_pipe.runs.evals import read_report, save_evaluation
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.record import Lineage
from openenv_pipe.system.markdown import percent_text
from openenv_pipe.types import Status

JUDGED = [
    *("reward=ruler", "judge=openai", "judge.model=m", "judge.api_key=null"),
    "judge.base_url=http://127.0.0.1:1/v1",
]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def folder(tmp_path):
    return run_samples.create(tmp_path)


def test_the_report_says_what_a_run_cost(tmp_path, monkeypatch):
    prices = [
        "judge.price_per_million_prompt_tokens=1e3",
        "judge.price_per_million_answer_tokens=5e3",
    ]
    config = amend(run_samples.config(tmp_path), [*JUDGED, *prices])
    folder = run_samples.create(tmp_path, config.model_copy(update={"price_per_hour": 7.2}))
    judged = {"judge/calls": 3, "judge/tokens": 1200, "judge/cost": 0.25, "tokens/sampled": 4000}
    run_samples.append(folder, *({**run_samples.record(step), **judged} for step in (1, 2)))
    monkeypatch.setattr(RunFolder, "duration_s", 1800.0)
    text = write_report(folder).read_text()
    assert "| grpo | 2 | 4.0 s | 3.0 s | 1.0 s | 8,000 | 200 |" in text
    assert "0.50 hours of a machine with" in text and "at 7.2 an hour: **3.60**" in text
    used = "; rewards of training used an answer 6 times."
    assert f"asked the judge for no answers: those that it needed were there already{used}" in text
    own = folder.verdicts / "ab"
    own.mkdir(parents=True)
    usage = {"usage": {"prompt_tokens": 300, "completion_tokens": 100}}
    for name, answer in {"a": usage, "b": {"failed": "broken"}}.items():
        (own / f"{name}.json").write_text(json.dumps(answer))
    text = write_report(folder).read_text()
    assert f"asked the judge for 1 answer: 400 tokens, at its prices: **0.80**{used}" in text


def test_the_report_says_how_many_episodes_have_no_reward(folder):
    run_samples.train(folder, num_steps=1)
    run_samples.evaluate(folder, "start", 0.2)
    assert "without a reward:" not in write_report(folder).read_text()
    silent = "term 'ruler': <b>no answer</b>"
    groups = run_samples.groups(num_groups=2, size=4)
    played = [episode for group in groups for episode in group.episodes]
    for episode in played:
        episode.unscored = silent
    write_episodes(episodes_path(folder.path, 2), groups)
    counts = {"episodes/count": 9, "episodes/failed": 1, METRIC: 8}
    run_samples.append(folder, {"stage": "grpo", "step": 2, **counts})
    save_evaluation(folder.path, run_samples.evaluation(folder, "trained", played, step=2))
    text = write_report(folder).read_text()
    assert "8 of 8 in training, 8 of 8 in the evaluation `trained`, because a judge" in text
    assert "One of the reasons: term 'ruler'" in text and "<b>" not in text
    assert "No task has a scored episode in both evaluations: there is nothing to compare." in text
    assert "8 episodes have no reward" in (folder.path / "eval/trained.md").read_text()


def test_the_report_says_what_a_signal_costs():
    first = {"groups/trained": 3, "groups/skipped": 1, "episodes/count": 16, "tokens/sampled": 3000}
    last = {"groups/trained": 0, "groups/skipped": 4, "episodes/count": 16, "tokens/sampled": 3000}
    steps = [{"stage": "grpo", **row} for row in [first] * 18 + [last] * 2]
    warm = {"stage": "warm_start", **first}
    assert signal_text([warm]) == ""
    assert signal_text([warm, steps[0]]) == (
        "**Learning signal:** 3 of 4 groups had a signal, one per 5.3 sampled episodes, or per "
        "1,000 sampled tokens."
    )
    assert signal_text([warm, *steps]) == (
        "**Learning signal:** 54 of 80 groups had a signal, one per 5.9 sampled episodes, or per "
        "1,111 sampled tokens; in the last 2 steps, 0 of 8 groups had a signal."
    )


def test_an_evaluation_keeps_its_episodes_and_a_page_to_read(folder):
    episodes = [*eval_episodes(num_tasks=3, samples=1), *eval_episodes(num_tasks=1, success=False)]
    episodes[-1].status, episodes[-1].error = Status.ERROR, "SessionClosedError: gone"
    episodes[0].reward = 9.0
    path, report = save(folder, "trained", episodes)
    groups = read_episodes(path.with_suffix(".jsonl.gz"))
    assert [len(group.episodes) for group in groups] == [1] * 5
    page = path.with_suffix(".md").read_text()
    assert report.unsuccessful == {"done": 1, "error": 1}
    assert "| done | 4 | 1 |" in page and "| error | 1 | 1 |" in page
    best, worst, failed = (page.index(f"## {title}") for title in ("Best", "Worst", "Failed"))
    assert failed < page.index("SessionClosedError") < worst < best < page.index("reward 9.000")


def test_an_evaluation_has_a_table_for_each_column_of_labels(folder):
    episodes = eval_episodes()
    for episode in episodes:
        episode.success = episode.task.index < 2
        tier = "10" if episode.task.index % 2 else "9"
        labels = {"tier": tier} | ({"topic": "sums | <b>"} if episode.task.index == 3 else {})
        episode.task = replace(episode.task, labels=labels)
    path, report = save(folder, "trained", episodes)
    found = report.by_label["tier"]
    assert {label: (each.num_tasks, each.success.mean) for label, each in found.items()} == {
        "9": (2, 0.5),
        "10": (2, 0.5),
    }
    assert report.by_label["topic"]["sums | <b>"].success.mean == 0.0
    assert read_report(path) == report
    page = path.with_suffix(".md").read_text()
    assert page.index("## By tier") < page.index("| 9 |") < page.index("| 10 |")
    assert "<b>" not in page
    groups = read_episodes(path.with_suffix(".jsonl.gz"))
    assert {group.task.labels["tier"] for group in groups} == {"9", "10"}


def test_the_report_of_a_finished_run_says_what_training_changed(folder):
    run_samples.train(folder)
    for label, rate, step in (("start", 0.1, 0), ("warm_start", 0.4, 0), ("trained", 0.9, 2)):
        run_samples.evaluate(folder, label, rate, step)
    folder.update(num_parameters=1_234_567)
    folder.finish("finished")
    text = write_report(folder).read_text()
    assert "success rate 10% → 90%** (+80 points, +" in text
    assert "success rate 40% → 90%" in text
    assert "| [after the warm start](eval/warm_start.md) | 40% [" in text
    assert "1,234,567 parameters" in text
    assert "**Best**: task eval/" in text
    assert f"openenv-pipe eval {folder.path}" in text
    for name in ("learning_curves.png", "losses.png"):
        assert f"plots/{name}" in text
        assert (folder.path / "plots" / name).read_bytes().startswith(PNG)


def test_the_evaluation_before_a_run_was_extended_is_not_called_the_last(folder):
    run_samples.train(folder, num_steps=3)
    for label, rate in (("start", 0.1), ("trained", 0.5), ("trained_greedy", 0.6)):
        run_samples.evaluate(folder, label, rate, step=0 if label == "start" else 2)
    text = write_report(folder).read_text()
    assert "At the start → after the first 2 steps of GRPO: **success rate 10% → 50%**" in text
    assert "| [after the first 2 steps of GRPO](eval/trained.md) |" in text
    assert "| [after the first 2 steps of GRPO, greedy](eval/trained_greedy.md) |" in text
    assert "after GRPO" not in text
    (row,) = list_runs([folder.path.parents[1]])
    assert row.success == "10% → –"
    run_samples.evaluate(folder, "trained", 0.9, step=3)
    text = write_report(folder).read_text()
    assert "At the start → after GRPO: **success rate 10% → 90%**" in text
    assert "| [after GRPO](eval/trained_2.md) |" in text
    (row,) = list_runs([folder.path.parents[1]])
    assert row.success == "10% → 90%"


def test_a_success_that_is_not_whole_does_not_read_as_whole(folder):
    for label, num_solved in (("start", 1), ("trained", 299)):
        played = [run_samples.episode(Random(0), i, 0, success=i < num_solved) for i in range(300)]
        save(folder, label, played)
    text = write_report(folder).read_text()
    assert "success rate 0.3% → 99.7%**" in text and "| 99.7% [" in text
    (row,) = list_runs([folder.path.parents[1]])
    assert row.success == "0.3% → 99.7%"


@pytest.mark.parametrize(
    ("share", "text"),
    [
        *((0.0, "0%"), (1.0, "100%"), (0.995, "99.5%"), (0.004, "0.4%"), (0.994, "99%")),
        *((1 / 3000, "0.03%"), (1 - 1e-12, "100%"), (1e-12, "0%")),
    ],
)
def test_only_whole_shares_read_as_whole(share, text):
    assert percent_text(share) == text


def test_a_change_that_may_be_chance_is_called_so(folder):
    run_samples.evaluate(folder, "start", 0.4)
    run_samples.evaluate(folder, "trained", 0.5)
    assert "no proof of a change" in write_report(folder).read_text()


def test_a_proved_change_of_one_measure_is_not_denied_because_of_the_other(folder):
    """Rewards rise although no episode succeeds: the sentence is about the number it judges."""
    for label, reward in (("start", -0.9), ("trained", 0.0)):
        played = [run_samples.episode(Random(0), i, 0, success=False) for i in range(10)]
        for episode in played:
            episode.reward = reward
        save_evaluation(folder.path, run_samples.evaluation(folder, label, played))
    text = write_report(folder).read_text()
    assert "Only the reward has provably changed, not the success rate." in text
    assert "no proof of a change" not in text


def test_the_means_of_a_change_are_over_the_tasks_of_its_difference(folder):
    """Episodes that fail after training are the ones that had no success before it."""
    run_samples.evaluate(folder, "start", 0.8)
    run_samples.evaluate(folder, "trained", 0.8, num_failed=2)
    text = write_report(folder).read_text()
    assert "success rate 100% → 100%** (+0 points" in text and "on 8 of 10 tasks scored" in text
    reward = re.search(r"reward ([\d.]+) → ([\d.]+) \(([-+][\d.]+)", text)
    first, last, change = map(float, reward.groups())
    assert first > 1.0 and last - first == pytest.approx(change, abs=1e-3)


def test_a_run_without_anything_yet_has_a_report(folder):
    text = write_report(folder).read_text()
    assert "**running**, 0 of 2 GRPO steps" in text
    assert "no result" in text
    assert "png" not in text


def test_lost_metrics_and_the_steps_of_another_run_are_said(tmp_path):
    whole = run_samples.create(tmp_path)
    run_samples.train(whole)
    whole.finish("finished")
    assert "2 of 2 GRPO steps in" in write_report(whole).read_text()
    lines = whole.metrics_path.read_text().splitlines(keepends=True)
    whole.metrics_path.write_text("".join(lines[:-1]))
    assert "the end of `metrics.jsonl` is lost" in write_report(whole).read_text()

    fork = run_samples.create(tmp_path, lineage=whole.lineage("fork", "step_000001"))
    fork.metrics_path.write_text(lines[-1])
    fork.finish("finished")
    expected = "2 of 2 GRPO steps, the first 1 of these by the run that it goes on from, in"
    assert expected in write_report(fork).read_text()


def test_the_report_of_clients_speaks_of_their_rewards_and_not_of_evaluations(tmp_path):
    folder = run_samples.create(tmp_path, compose(["conf=client", f"runs_dir={tmp_path}"]).config)
    text = write_report(folder).read_text()
    assert "There is no result, because clients play no evaluations" in text
    assert f"openenv-pipe serve {folder.path}@start" in text and "openenv-pipe eval" not in text
    lost = {"clients/lost": 0, "clients/late": 0, "clients/failed": 0, "groups/dropped": 0}
    for step in range(1, 11):
        reward = {"reward/mean": 0.25 if step <= 5 else 0.75}
        run_samples.append(folder, {**run_samples.record(step), **lost, **reward})
    text = write_report(folder).read_text()
    assert "**0.250 → 0.750**, from the first 5 steps to the last 5" in text
    assert "| tasks | those that clients bring |" in text and "at most" not in text
    assert "none was lost. Groups that were left" in text


def test_a_run_that_stopped_early_says_why(folder):
    run_samples.evaluate(folder, "baseline_expert", 0.9)
    run_samples.evaluate(folder, "trained", 0.5, step=1)
    folder.finish("finished", cause="stopped early: it was good enough")
    text = write_report(folder).read_text()
    assert "It stopped early: it was good enough" in text
    assert "Success of the baselines: expert 90%." in text
    assert "| [baseline: expert](eval/baseline_expert.md) | 90% [" in text
    assert "5 done |" in text


def test_a_failed_run_has_a_report_with_its_cause(folder):
    run_samples.train(folder, 1)
    run_samples.evaluate(folder, "start", 0.4)
    folder.finish("failed", cause="env 'wordle' died")
    text = write_report(folder).read_text()
    assert "**failed**, 1 of 2 GRPO steps" in text and "env 'wordle' died" in text
    assert "![learning curves]" in text


def test_equal_data_give_equal_images(tmp_path):
    records = [run_samples.record(step) for step in range(1, 4)]
    for name in ("a.png", "b.png"):
        assert draw_learning_curves(tmp_path / name, records, [], 3)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_nothing_to_draw_is_no_image(tmp_path):
    assert not draw_learning_curves(tmp_path / "a.png", [], [], 3)
    assert not draw_losses(tmp_path / "b.png", [{"stage": "grpo", "step": 1, "loss/kl": None}])
    assert not list(tmp_path.iterdir())


def test_evaluations_without_a_reward_are_drawn_without_a_legend(folder, tmp_path):
    """As after a judge that has failed; a legend of nothing would raise a warning."""
    nothing = {"reward": None, "success": None}
    evaluation = run_samples.evaluation(folder, "start", eval_episodes())
    report = evaluation.report.model_copy(update=nothing)
    assert draw_learning_curves(tmp_path / "a.png", [], [report], 3)


def test_smoothing_keeps_lines_and_means():
    line = numpy.arange(20.0)
    assert smooth(line, 5)[2:-2] == pytest.approx(line[2:-2])
    assert smooth(numpy.full(7, 3.0), 3) == pytest.approx(3.0)
    assert smooth(numpy.array([1.0, 4.0]), 3) == pytest.approx(2.5)
    assert not math.isnan(smooth(line, 19).sum())


def test_the_keys_that_an_attempt_changed_are_in_the_report(tmp_path):
    folder = run_samples.create(tmp_path)
    folder.finish("interrupted", cause="interrupted")
    folder.begin_attempt(
        folder.written_config,
        command=["openenv-pipe"],
        checkpoint="step_000002",
        changed={"trainer.steps": [2, 5]},
        differences=[],
    )
    text = write_report(folder).read_text()
    first, second = (
        "interrupted (from the beginning)",
        "running (from step_000002, `trainer.steps=5`)",
    )
    assert f"| attempts | {first}, {second} |" in text


def test_a_fork_is_called_one_in_its_report_and_in_the_list(tmp_path):
    lineage = Lineage(
        kind="fork", run="larger/0001", path="/x", checkpoint="step_000004", changed={}
    )
    forked = run_samples.create(tmp_path, lineage=lineage)
    assert "fork of larger/0001@step_000004: 0 of 2 GRPO" in write_report(forked).read_text()
    console = Console(file=StringIO(), width=120)
    console.print(runs_table(list_runs([tmp_path])))
    assert "fork of larger/0001@step_000004" in console.file.getvalue()


def test_evaluations_on_other_tasks_do_not_stop_the_report(folder):
    """A run that was resumed with other tasks of evaluation still gets its report."""
    run_samples.evaluate(folder, "start", 0.4)
    played = [run_samples.episode(Random(0), 100 + i, 0, success=True) for i in range(4)]
    save_evaluation(folder.path, run_samples.evaluation(folder, "trained", played))
    assert "have no task in common" in write_report(folder).read_text()


def test_report_of_a_run_interrupted_in_its_warm_start_names_who_wrote_the_episodes(folder):
    write_episodes(episodes_path(folder.path, 0), run_samples.groups())
    folder.finish("interrupted", cause="interrupted")
    text = write_report(folder).read_text()
    title = "## Episodes that the warm start imitates, written by wordle.policies:consistent\n"
    assert title in text
    assert "Episodes of the last step" not in text
    assert "The run is **interrupted**" in text and "Cause" not in text
    write_episodes(episodes_path(folder.path, 1), run_samples.groups())
    assert "## Episodes of the last step\n" in write_report(folder).read_text()


def test_the_folder_of_each_checkout_is_named(tmp_path, monkeypatch):
    """A commit of a repository of environments is none of this program's."""
    repository = tmp_path / "my_envs"
    repository.mkdir()
    monkeypatch.chdir(repository)
    (repository / "new.py").touch()
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init"], ["add", "new.py"], [*author, "commit", "--message=new"]):
        subprocess.run(["git", *words], check=True, capture_output=True)
    (repository / "new.py").write_text("1\n")
    folder = run_samples.create(tmp_path / "runs")
    checkouts = folder.record.checkouts
    assert checkouts[-1].folder == str(repository)
    sha = checkouts[-1].sha[:10]
    assert f"`my_envs` at {sha} with changes |" in write_report(folder).read_text()
