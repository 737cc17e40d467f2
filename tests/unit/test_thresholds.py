"""`eval --fail-under`, and the same of `compare`."""

from types import SimpleNamespace

import pytest

from openenv_pipe.commands.thresholds import compare_with_thresholds, means_of, parse_thresholds
from openenv_pipe.errors import UserError
from openenv_pipe.system.intervals import Interval


def row(name, success, reward):
    means = {
        key: None if mean is None else Interval(mean=mean, low=None, high=None)
        for key, mean in (("success", success), ("reward", reward))
    }
    return SimpleNamespace(name=name, report=SimpleNamespace(label="trained", **means))


def test_means_below_their_thresholds_are_named():
    thresholds = parse_thresholds(["success=0.8", "reward=-1"], None)
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
        parse_thresholds([text], None)


@pytest.mark.parametrize("text", ["success=80", "success=-0.1"])
def test_a_success_in_percent_is_rejected(text):
    with pytest.raises(UserError, match="expected a share from 0 to 1"):
        parse_thresholds([text], None)
