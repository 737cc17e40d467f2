"""`--fail-under` of `eval` and `compare`, and `--fail-if-worse`."""

from types import SimpleNamespace

import pytest
import run_samples

from openenv_pipe.commands.findings import Result
from openenv_pipe.commands.thresholds import (
    compare_with_first,
    compare_with_thresholds,
    means_of,
    parse_margins,
    parse_thresholds,
)
from openenv_pipe.config.compose import compose
from openenv_pipe.errors import UserError
from openenv_pipe.reports.eval_table import Row
from openenv_pipe.runs.evals import read_reports
from openenv_pipe.system.intervals import Interval


def row(name, success, reward):
    means = {
        key: None if mean is None else Interval(mean=mean, low=None, high=None)
        for key, mean in (("success", success), ("reward", reward))
    }
    return SimpleNamespace(name=name, report=SimpleNamespace(label="trained", **means))


def test_means_below_their_thresholds_are_named():
    thresholds = parse_thresholds(["success=0.8", "reward=-1"])
    means = means_of([row("good", 0.8, 0.0), row("bad", 0.79, -2.0), row("unknown", None, 0.0)])
    lines = compare_with_thresholds(means, thresholds)
    assert [f"{line.result} {line.name} {line.text}" for line in lines] == [
        "ok good: success 0.800 is at least 0.8",
        "ok good: reward 0.000 is at least -1",
        "fail bad: success 0.790 is below 0.8",
        "fail bad: reward -2.000 is below -1",
        "fail unknown: success was not measured, so it is not 0.8",
        "ok unknown: reward 0.000 is at least -1",
    ]
    assert compare_with_thresholds(means, {}) == []


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
        (0.9, 0.9, Result.OK, "+0.000 (-0.308..+0.308), may be -0.05"),
        (0.9, 0.1, Result.FAIL, "-0.800 (-1.000..-0.448), may be -0.05"),
        (0.5, 0.4, Result.OK, "may be chance"),
    ],
)
def test_a_run_that_is_worse_than_the_first_and_not_by_chance_fails(
    tmp_path, before, after, result, text
):
    folders = [run_samples.create(tmp_path) for _ in range(2)]
    rows = []
    for name, folder, mean in zip(("old", "new"), folders, (before, after), strict=True):
        run_samples.evaluate(folder, "trained", mean)
        report = read_reports(folder.path)["trained"]
        rows.append(Row(name=name, report=report, folder=folder.path))
    (line,) = compare_with_first(rows, {"success": 0.05}, compose(["conf=smoke"]).config.eval, 0)
    assert (line.name, line.result) == ("new: success less old's", result)
    assert text in line.text


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
