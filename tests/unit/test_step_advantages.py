"""Baselines and scales over more than a group: RLOO, REINFORCE++ and its baseline form."""

import statistics

import pytest
from fakes import made_up_episode, made_up_group, made_up_turn, run_config
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv_pipe.algorithms.advantages import step_advantages
from openenv_pipe.errors import ConfigError
from openenv_pipe.types import Group

REWARDS = st.lists(st.lists(st.floats(-10.0, 10.0), min_size=2, max_size=5), min_size=1, max_size=4)


def advantages(*rewards, baseline, scale="none", discount=1.0, **options):
    """Return each episode's first advantage, by group and member; None for groups without
    signal."""
    groups = [made_up_group(each, id=str(number), **options) for number, each in enumerate(rewards)]
    found = step_advantages(groups, baseline=baseline, scale=scale, discount=discount)
    return [[values[0] for values in each.by_member.values()] or None for each in found]


def test_leave_one_out_by_hand():
    """RLOO: 6 is compared with the mean of 0 and 3, and so on."""
    assert advantages([0.0, 3.0, 6.0], baseline="leave_one_out") == [[-4.5, 0.0, 4.5]]


@settings(derandomize=True, deadline=None, max_examples=30)
@given(REWARDS)
def test_leave_one_out_is_each_reward_against_the_mean_of_the_others(rewards):
    for each, values in zip(rewards, advantages(*rewards, baseline="leave_one_out"), strict=True):
        others = [sum(each[:at] + each[at + 1 :]) / (len(each) - 1) for at in range(len(each))]
        expected = [reward - other for reward, other in zip(each, others, strict=True)]
        assert (values or [0.0] * len(each)) == pytest.approx(expected, abs=1e-7)


def test_leave_one_out_has_no_bias_where_the_group_mean_has_one():
    """A reward that enters its own baseline shrinks the group's advantages by (G - 1) / G."""
    (group,) = advantages([0.0, 3.0, 6.0], baseline="group")
    (out,) = advantages([0.0, 3.0, 6.0], baseline="leave_one_out")
    assert [value * 2 / 3 for value in out] == pytest.approx(group)


def test_a_turn_that_one_member_alone_reached_has_nobody_to_be_compared_with():
    turns = [made_up_turn([5], [6])]
    episodes = [
        made_up_episode(1.0, member=0, turns=turns, turn_rewards=[1.0]),
        made_up_episode(12.0, member=1, turns=turns * 2, turn_rewards=[3.0, 9.0]),
    ]
    group = Group(id="0", task=episodes[0].task, episodes=episodes)
    (found,) = step_advantages([group], baseline="leave_one_out", scale="none", discount=0.0)
    assert found.by_member == {0: [-2.0], 1: [2.0, 0.0]}


def test_reinforce_plus_plus_by_hand():
    """Over all four rewards the mean is 3 and the deviation that of 1, 2, 3, 6."""
    deviation = statistics.stdev([1.0, 2.0, 3.0, 6.0]) + 1e-4
    expected = [[-2 / deviation, -1 / deviation], [0.0, 3 / deviation]]
    found = advantages([1.0, 2.0], [3.0, 6.0], baseline="batch", scale="batch")
    for seen, values in zip(found, expected, strict=True):
        assert seen == pytest.approx(values)


def test_a_group_without_spread_has_a_signal_where_it_is_compared_with_others():
    found = advantages([1.0, 1.0], [0.0, 0.0], baseline="batch")
    assert found == [[0.5, 0.5], [-0.5, -0.5]]
    assert advantages([1.0, 1.0], [0.0, 0.0], baseline="group") == [None, None]
    assert advantages([1.0, 1.0], [1.0, 1.0], baseline="batch") == [None, None]


def test_reinforce_plus_plus_baseline_by_hand():
    """Rewards are centred in each group, then divided by the deviation of all centred rewards."""
    deviation = (2 * 0.5**2 + 2 * 1.5**2) / 3
    found = advantages([1.0, 2.0], [3.0, 6.0], baseline="group", scale="batch")
    divisor = deviation**0.5 + 1e-4
    assert found[0] == pytest.approx([-0.5 / divisor, 0.5 / divisor])
    assert found[1] == pytest.approx([-1.5 / divisor, 1.5 / divisor])


@settings(derandomize=True, deadline=None, max_examples=30)
@given(REWARDS, st.sampled_from([("group", "batch"), ("batch", "batch"), ("batch", "none")]))
def test_step_wide_advantages_sum_to_zero_and_do_not_depend_on_the_order(rewards, options):
    baseline, scale = options
    found = advantages(*rewards, baseline=baseline, scale=scale)
    flat = [value for values in found for value in values or []]
    assert sum(flat) == pytest.approx(0.0, abs=1e-4)
    backwards = advantages(*rewards[::-1], baseline=baseline, scale=scale)[::-1]
    for seen, values in zip(backwards, found, strict=True):
        assert (seen or []) == pytest.approx(values or [])


def test_maxrl_is_the_papers_estimator():
    """Theorem 1 of arXiv:2602.02710, for N rollouts of which K succeed: the mean score of the
    successes minus the mean score of all, so each rollout has the weight r / K - 1 / N."""
    for rewards in ([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0]):
        (found,) = advantages(rewards, baseline="group", scale="mean")
        num_all, num_solved = len(rewards), sum(rewards)
        expected = [reward / num_solved - 1 / num_all for reward in rewards]
        assert [value / num_all for value in found] == pytest.approx(expected)


def test_maxrl_has_no_signal_without_a_success_and_rejects_negative_rewards():
    assert advantages([0.0, 0.0], [1.0, 1.0], baseline="group", scale="mean") == [None, None]
    with pytest.raises(ConfigError, match="expected at least 0"):
        advantages([1.0, -0.5], baseline="group", scale="mean")


def test_a_failed_episode_is_not_among_those_compared_with():
    """Trap 14: this also holds for baselines over all episodes, or over the group's other
    episodes."""
    for baseline in ("leave_one_out", "batch"):
        found = advantages([100.0, 0.0, 2.0], baseline=baseline, failed=[0])
        factor = 2.0 if baseline == "leave_one_out" else 1.0
        assert found == [[-1.0 * factor, 1.0 * factor]]


def test_one_scored_episode_is_enough_only_to_be_compared_with_other_groups():
    lone, pair = made_up_group([5.0, 3.0], failed=[0]), made_up_group([0.0, 0.0], id="1")
    by_group = step_advantages([lone, pair], baseline="group", scale="none", discount=1.0)
    assert [each.has_signal for each in by_group] == [False, False]
    by_batch = step_advantages([lone, pair], baseline="batch", scale="none", discount=1.0)
    assert [each.by_member for each in by_batch] == [{1: [2.0]}, {0: [-1.0], 1: [-1.0]}]


def test_a_scale_by_group_for_a_baseline_of_all_is_rejected():
    with pytest.raises(ValueError, match=r"advantage\.scale=batch or none"):
        run_config({"trainer.advantage.baseline": "batch"})
