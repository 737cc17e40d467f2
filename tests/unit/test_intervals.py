"""Confidence intervals against closed forms, and the inputs that they reject."""

import math
from itertools import combinations

import numpy
import pytest

from openenv_pipe.system.intervals import (
    FRACTIONS,
    bootstrap_interval,
    interval_over_runs,
    paired_difference,
    pass_at_k,
)

SETTINGS = {"num_resamples": 4000, "confidence": 0.95, "seed": 0}
Z_95 = 1.959964


def test_the_interval_of_many_tasks_is_the_normal_one():
    values = numpy.random.default_rng(1).normal(3.0, 2.0, size=400)
    interval = bootstrap_interval([[value] for value in values], **SETTINGS)
    error = values.std() / math.sqrt(len(values))
    assert interval.mean == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - Z_95 * error, abs=0.12 * error)
    assert interval.high == pytest.approx(values.mean() + Z_95 * error, abs=0.12 * error)


def test_the_interval_of_a_success_rate_is_the_binomial_one():
    interval = bootstrap_interval([[True]] * 60 + [[False]] * 140, **SETTINGS)
    error = math.sqrt(0.3 * 0.7 / 200)
    assert interval.mean == pytest.approx(0.3)
    assert interval.high - interval.low == pytest.approx(2 * Z_95 * error, rel=0.08)


def test_more_samples_of_the_same_tasks_do_not_narrow_the_interval():
    once = [[float(i % 2)] for i in range(50)]
    many = [values * 10 for values in once]
    assert bootstrap_interval(many, **SETTINGS) == bootstrap_interval(once, **SETTINGS)


def test_tasks_count_the_same_however_many_samples_they_have():
    interval = bootstrap_interval([[1.0], [0.0] * 9, []], **SETTINGS)
    assert interval.mean == 0.5


@pytest.mark.parametrize(("num_tasks", "low"), [(2, 0.1581), (10, 0.6915), (50, 0.9289)])
def test_equal_fractions_have_the_binomial_interval(num_tasks, low):
    """Of Clopper and Pearson: the tables' limits for n successes of n, and for none."""
    all_of_them = bootstrap_interval([[True]] * num_tasks, bounds=FRACTIONS, **SETTINGS)
    assert (all_of_them.mean, all_of_them.high) == (1.0, 1.0)
    assert all_of_them.low == pytest.approx(low, abs=1e-4)
    none = bootstrap_interval([[False] * 3] * num_tasks, bounds=FRACTIONS, **SETTINGS)
    assert (none.mean, none.low, none.high) == (0.0, 0.0, pytest.approx(1 - low, abs=1e-4))
    halves = bootstrap_interval([[True, False]] * num_tasks, bounds=FRACTIONS, **SETTINGS)
    assert halves.low == pytest.approx(low / 2, abs=1e-4)
    assert halves.high == pytest.approx(1 - low / 2, abs=1e-4)


def test_equal_values_without_known_bounds_have_no_interval():
    interval = bootstrap_interval([[0.1 + 0.2], *[[0.3]] * 7], **SETTINGS)  # equal but for rounding
    assert (interval.mean, interval.low, interval.high) == (pytest.approx(0.3), None, None)
    assert f"{interval:.2f}" == "0.30" and not interval.excludes_zero


@pytest.mark.parametrize("values", [[[1.0]], [[1.0], [], []], [[0.0, 1.0, 0.5]]])
def test_one_task_has_a_mean_and_no_interval(values):
    interval = bootstrap_interval(values, bounds=FRACTIONS, **SETTINGS)
    assert (interval.low, interval.high) == (None, None)
    change = paired_difference(values, [[each + 1 for each in task] for task in values], **SETTINGS)
    assert (change.mean, change.low, change.high) == (1.0, None, None)
    assert not change.excludes_zero


def test_too_few_scored_tasks_have_no_interval():
    values = [[0.0], [1.0], [1.0], [0.0]] * 4 + [[]] * 4
    assert bootstrap_interval(values, min_share=0.8, **SETTINGS).low is not None
    assert bootstrap_interval(values, min_share=0.81, **SETTINGS).low is None
    up = [[each + 1 for each in task] for task in values]
    assert paired_difference(values, [[], *up[1:]], min_share=0.8, **SETTINGS).low is None


def test_a_change_of_all_tasks_is_proved_from_as_many_as_a_sign_test_needs():
    def proves(num_tasks):
        change = paired_difference([[0.0]] * num_tasks, [[1.0]] * num_tasks, **SETTINGS)
        return change.excludes_zero

    assert [proves(number) for number in range(2, 9)] == [2 / 2**n < 0.05 for n in range(2, 9)]
    same = paired_difference([[True]] * 9, [[True]] * 9, bounds=FRACTIONS, **SETTINGS)
    assert same.low < same.mean == 0.0 < same.high


def test_a_few_tasks_have_the_interval_of_student():
    values = [0.4, 0.5, 0.9]
    interval = bootstrap_interval([[value] for value in values], **SETTINGS)
    assert interval == interval_over_runs(values, SETTINGS["confidence"])
    assert not paired_difference([[0.0], [0.0]], [[0.4], [0.5]], **SETTINGS).excludes_zero
    bounded = bootstrap_interval([[0.0], [1.0]], bounds=FRACTIONS, **SETTINGS)
    assert (bounded.low, bounded.high) == FRACTIONS


def test_the_same_seed_gives_the_same_interval():
    values = [[float(i)] for i in range(12)]
    assert bootstrap_interval(values, **SETTINGS) == bootstrap_interval(values, **SETTINGS)
    assert bootstrap_interval(values, **SETTINGS | {"seed": 1}) != bootstrap_interval(
        values, **SETTINGS
    )


def test_pairing_takes_the_difficulty_of_tasks_out():
    random = numpy.random.default_rng(2)
    difficulty = random.normal(0.0, 10.0, size=100)
    before = [[value] for value in difficulty]
    after = [
        [value + 1.0 + noise]
        for value, noise in zip(difficulty, random.normal(size=100), strict=True)
    ]
    interval = paired_difference(before, after, **SETTINGS)
    assert interval.excludes_zero
    assert interval.low < 1.0 < interval.high
    assert interval.high - interval.low < 0.5


def test_pairs_need_values_on_both_sides():
    interval = paired_difference([[1.0], [], [5.0]], [[2.0], [9.0], []], **SETTINGS)
    assert interval.mean == 1.0
    assert paired_difference([[1.0]], [[]], **SETTINGS) is None
    with pytest.raises(ValueError):
        paired_difference([[1.0]], [], **SETTINGS)


def test_nothing_has_no_interval_and_nan_is_rejected():
    assert bootstrap_interval([[], []], **SETTINGS) is None
    with pytest.raises(ValueError, match="finite"):
        bootstrap_interval([[math.nan]], **SETTINGS)


@pytest.mark.parametrize("num_successes", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_draws_with_a_success(num_successes, k):
    samples = [True] * num_successes + [False] * (5 - num_successes)
    draws = list(combinations(samples, k))
    assert pass_at_k(5, num_successes, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_unbiased():
    """arXiv:2107.03374, figure 13: for any number of samples n, the estimator's mean is the true
    value."""
    rate, num_samples, k = 0.3, 10, 4
    expected = sum(
        math.comb(num_samples, c) * rate**c * (1 - rate) ** (num_samples - c) * pass_at_k(10, c, k)
        for c in range(num_samples + 1)
    )
    assert expected == pytest.approx(1 - (1 - rate) ** k)


def test_pass_at_k_needs_k_samples():
    for k in (0, 4):
        with pytest.raises(ValueError, match="samples"):
            pass_at_k(3, 1, k)


@pytest.mark.parametrize(
    ("num_runs", "quantile"), [(2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776), (31, 2.042)]
)
def test_intervals_over_runs_are_students(num_runs, quantile):
    """The quantiles are from a table of Student's t distribution."""
    values = [float(i) for i in range(num_runs)]
    interval = interval_over_runs(values, 0.95)
    error = numpy.std(values, ddof=1) / math.sqrt(num_runs)
    assert interval.high - interval.mean == pytest.approx(quantile * error, rel=1e-3)
    assert interval.mean - interval.low == pytest.approx(interval.high - interval.mean)


def test_one_run_has_no_interval_and_nan_is_rejected():
    assert interval_over_runs([1.0], 0.95) is None
    with pytest.raises(ValueError, match="finite"):
        interval_over_runs([1.0, math.nan], 0.95)


def test_equal_runs_are_no_proof():
    """Two seeds with 49 of 50 tasks each: another seed may well have fewer."""
    interval = interval_over_runs([0.98, 0.98], 0.95, FRACTIONS)
    assert interval.low < 0.5 and 0.98 < interval.high < 1.0
    without_bounds = interval_over_runs([0.98, 0.98], 0.95)
    assert (without_bounds.mean, without_bounds.low, without_bounds.high) == (0.98, None, None)
