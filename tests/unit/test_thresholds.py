"""`eval --fail-under`."""

from types import SimpleNamespace

import pytest

from openenv_pipe.errors import UserError
from openenv_pipe.reports.thresholds import below_thresholds, parse_thresholds
from openenv_pipe.system.intervals import Interval


def row(name, success, reward):
    means = {
        key: None if mean is None else Interval(mean=mean, low=None, high=None)
        for key, mean in (("success", success), ("reward", reward))
    }
    return SimpleNamespace(name=name, report=SimpleNamespace(label="trained", **means))


def test_means_below_their_thresholds_are_named():
    thresholds = parse_thresholds(["success=0.8", "reward=-1"])
    rows = [row("good", 0.8, 0.0), row("bad", 0.79, -2.0), row("unknown", None, 0.0)]
    assert below_thresholds(rows, thresholds) == [
        "bad: success 0.790 is below 0.8",
        "bad: reward -2.000 is below -1",
        "unknown: success was not measured, so it is not 0.8",
    ]
    assert below_thresholds(rows, {}) == []


@pytest.mark.parametrize("text", ["success", "success=high", "accuracy=0.5", "success=nan", "=1"])
def test_another_metric_or_value_is_rejected(text):
    with pytest.raises(UserError, match=r"--fail-under .*expected success or reward and a number"):
        parse_thresholds([text])
