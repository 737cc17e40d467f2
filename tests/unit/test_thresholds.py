"""`--fail-under` of `eval` and `compare`, and `--fail-if-worse`."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import run_samples

from openenv_pipe.commands.findings import Result, verdict
from openenv_pipe.commands.thresholds import (
    compare_with_first,
    compare_with_thresholds,
    measured_of,
    parse_margins,
    parse_thresholds,
)
from openenv_pipe.config.compose import compose
from openenv_pipe.errors import UserError
from openenv_pipe.reports.eval_table import Row
from openenv_pipe.runs.evals import read_reports
from openenv_pipe.system.intervals import Interval


def row(name, success, reward, duration_s=None):
    means = {
        key: None if mean is None else Interval(mean=mean, low=None, high=None)
        for key, mean in (("success", success), ("reward", reward))
    }
    tasks = [SimpleNamespace(successes=[True], rewards=[0.0])] * 5
    scored = {"num_tasks": 5, "num_scored_tasks": 5, "tasks": tasks}
    report = SimpleNamespace(label="trained", **scored, **means)
    return SimpleNamespace(name=name, report=report, objection=None, duration_s=duration_s)


def test_means_below_their_thresholds_are_named():
    thresholds = parse_thresholds(["success=0.8", "reward=-1"])
    rows = [row("good", 0.8, 0.0), row("bad", 0.79, -2.0, 1.5), row("unknown", None, 0.0)]
    lines = compare_with_thresholds(measured_of(rows, 0.8), thresholds)
    assert [*map(verdict, lines)] == [
        "OK good: success 0.800 >= 0.8",
        "OK good: reward 0.000 >= -1",
        "FAIL bad: success 0.790 < 0.8",
        "FAIL bad: reward -2.000 < -1",
        "FAIL unknown: success was not measured; it has to be 0.8",
        "OK unknown: reward 0.000 >= -1",
    ]
    assert [line.duration_s for line in lines] == [None, None, 1.5, 1.5, None, None]
    assert compare_with_thresholds(measured_of(rows, 0.8), {}) == []


def two_rows(tmp_path, means=(1.0, 1.0), num_failed=0, **fields):
    """Two rows of ten tasks with these means, of which some have no score in the second."""
    rows = []
    for name, mean, failed in zip(("old", "new"), means, (0, num_failed), strict=True):
        folder = run_samples.create(tmp_path)
        run_samples.evaluate(folder, "trained", mean, num_failed=failed)
        report = read_reports(folder.path)["trained"]
        rows.append(Row(name=name, report=report, folder=folder.path, **fields))
    return rows


@pytest.mark.parametrize(
    ("num_failed", "objection", "expected"),
    [
        (8, None, ["FAIL", "2 of 10 tasks scored, too few (eval.min_scored_share)"]),
        (0, "latest is interrupted, not finished", ["FAIL", "latest is interrupted"]),
    ],
)
def test_what_decides_nothing_fails_however_high(tmp_path, num_failed, objection, expected):
    rows = two_rows(tmp_path, num_failed=num_failed, objection=objection)
    config = compose(["conf=smoke"]).config.eval
    measured = measured_of(rows[1:], config.min_scored_share)
    (own,) = compare_with_thresholds(measured, {"success": 0.5})
    (paired,) = compare_with_first(rows, {"success": 0.05}, config, 0)
    for line in (own, paired):
        assert all(each in verdict(line) for each in expected)


@pytest.mark.parametrize(
    ("num_judged", "expected"),
    [(1, "1 of 10 tasks with a reward, too few (eval.min_scored_share)"), (8, None)],
)
def test_a_reward_that_few_tasks_have_decides_nothing(tmp_path, num_judged, expected):
    """A judge whose budget is spent (judge.when_spent=continue) leaves the rest without one."""
    rows = two_rows(tmp_path)
    tasks = [
        task if index < num_judged else task.model_copy(update={"rewards": []})
        for index, task in enumerate(rows[1].report.tasks)
    ]
    rows[1] = replace(rows[1], report=rows[1].report.model_copy(update={"tasks": tasks}))
    config = compose(["conf=smoke"]).config.eval
    measured = measured_of(rows[1:], config.min_scored_share)
    (own,) = compare_with_thresholds(measured, {"reward": 0.5})
    (success,) = compare_with_thresholds(measured, {"success": 0.5})
    (paired,) = compare_with_first(rows, {"reward": 5.0}, config, 0)
    assert success.result is Result.OK
    for line in (own, paired):
        assert line.result is (Result.FAIL if expected else Result.OK), line
        assert (expected or "") in line.text


@pytest.mark.parametrize("text", ["success", "success=high", "accuracy=0.5", "success=nan", "=1"])
def test_another_metric_or_value_is_rejected(text):
    with pytest.raises(UserError, match=r"--fail-under .*expected success or reward and a number"):
        parse_thresholds([text])


@pytest.mark.parametrize("text", ["success=80", "success=-0.1"])
def test_a_success_in_percent_is_rejected(text):
    with pytest.raises(UserError, match="expected a share from 0 to 1"):
        parse_thresholds([text])


@pytest.mark.parametrize(
    ("before", "after", "result", "text"),
    [
        (0.9, 0.1, Result.FAIL, "-0.800 (-1.000..-0.448), where a loss of 0.05 is allowed"),
        (0.1, 0.9, Result.OK, "where a loss of 0.05 is allowed"),
        # 10 * (0.3085 / 0.05)² = 381 tasks, rounded up
        (0.0, 0.0, Result.WARN, "a larger loss may be hidden: about 390 tasks would show it"),
        (0.5, 0.4, Result.WARN, "the interval over 10 tasks is wider, so it may be chance: about"),
    ],
)
def test_a_run_that_is_worse_than_the_first_and_not_by_chance_fails(
    tmp_path, before, after, result, text
):
    old, new = two_rows(tmp_path, (before, after))
    rows = [old, replace(new, duration_s=1)]
    (line,) = compare_with_first(rows, {"success": 0.05}, compose(["conf=smoke"]).config.eval, 0)
    assert (line.name, line.result) == ("new against old: success", result)
    assert line.duration_s == 1
    assert text in line.text


def test_an_allowance_of_nothing_needs_more_tasks_than_can_be_said(tmp_path):
    rows = two_rows(tmp_path, (0.5, 0.5))
    (line,) = compare_with_first(rows, {"success": 0.0}, compose(["conf=smoke"]).config.eval, 0)
    assert line.result is Result.WARN and line.text.endswith("on more tasks (eval.num_tasks)")


@pytest.mark.parametrize(
    ("texts", "num_runs", "message"),
    [
        (["success=0.1"], 1, "name two or more"),
        (["success=-0.1"], 2, "how much lower it may be"),
        (["succes=0.1"], 2, "expected success or reward"),
    ],
)
def test_margins_need_two_runs_and_a_loss(texts, num_runs, message):
    with pytest.raises(UserError, match=message):
        parse_margins(texts, num_runs)
