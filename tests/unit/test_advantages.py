"""Advantages of groups. Trap numbers: tests/README.md."""

import math

import pytest
from fakes import made_up_episode, made_up_group, made_up_turn, run_config
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv_pipe.algorithms.advantages import has_signal, step_advantages
from openenv_pipe.algorithms.losses.normalization import Uncomputed
from openenv_pipe.algorithms.samples import build_samples, count_uncomputed
from openenv_pipe.types import Finish, Group, Status

REWARDS = st.lists(st.floats(-100.0, 100.0), min_size=2, max_size=8)


def of_groups(*groups, scale="group", discount=1.0, baseline="group"):
    return step_advantages(groups, baseline=baseline, scale=scale, discount=discount)


def advantages(group, **options):
    """Return one group's advantages by member; empty if the group has no signal."""
    (found,) = of_groups(group, **options)
    assert found.group is group
    assert found.has_signal == bool(found.by_member)
    return found.by_member


def first_values(by_member):
    return {member: values[0] for member, values in by_member.items()}


def turns_group(*turn_rewards, wholes=None):
    """Return a group of episodes with these per-turn rewards, and optionally whole-episode
    rewards."""
    wholes = wholes or [0.0] * len(turn_rewards)
    episodes = [
        made_up_episode(
            sum(rewards) + whole,
            member=member,
            turns=[made_up_turn([5], [6]) for _ in rewards],
            turn_rewards=rewards,
        )
        for member, (rewards, whole) in enumerate(zip(turn_rewards, wholes, strict=True))
    ]
    return Group(id="0", task=episodes[0].task, episodes=episodes)


def test_std_is_the_sample_deviation_of_the_group():
    """Trap 12. Rewards 1, 2, 3: mean 2, standard deviation 1."""
    values = first_values(advantages(made_up_group([1.0, 2.0, 3.0])))
    assert values == pytest.approx({0: -1 / 1.0001, 1: 0.0, 2: 1 / 1.0001})


def test_without_scale_only_the_mean_is_taken_off():
    """Trap 12, Dr. GRPO: advantages are not divided by the deviation."""
    values = first_values(advantages(made_up_group([0.0, 0.0, 3.0]), scale="none"))
    assert values == pytest.approx({0: -1.0, 1: -1.0, 2: 2.0})


def test_every_turn_of_an_episode_gets_its_advantage():
    group = made_up_group([0.0, 1.0])
    group.episodes[1].turns *= 3
    values = advantages(group, scale="none")
    assert values == {0: [-0.5], 1: [0.5, 0.5, 0.5]}


@settings(derandomize=True, deadline=None)
@given(REWARDS)
def test_advantages_sum_to_zero_and_are_bounded(rewards):
    """Trap 13: no advantage exceeds (G - 1) / sqrt(G), even where rewards barely differ."""
    by_member = advantages(made_up_group(rewards))
    if not by_member:
        return
    values = list(first_values(by_member).values())
    bound = (len(values) - 1) / math.sqrt(len(values))
    assert abs(sum(values)) < 1e-6
    assert max(map(abs, values)) <= bound + 1e-9


@pytest.mark.parametrize("spread", [1e-7, 1e-5, 1e-3])
def test_a_tiny_spread_gives_no_large_advantage(spread):
    """Trap 13: the denominator has a floor, so rewards that barely differ give small advantages."""
    values = first_values(advantages(made_up_group([0.5, 0.5 + spread])))
    assert 0 < values[1] <= spread / 1e-4


@pytest.mark.parametrize(
    ("rewards", "failed"),
    [
        *[([reward] * 4, []) for reward in (0.0, 1.0, 0.1 + 0.2)],
        ([0.1 + 0.2, 0.3, 0.3], []),  # equal but for rounding
        *[([1.0, 2.0, 3.0], failed) for failed in ([0, 1, 2], [1, 2])],  # fewer than two are scored
    ],
)
def test_a_group_without_a_signal_gives_no_sample_and_so_no_forward_pass(rewards, failed):
    """Traps 13 and 14."""
    group = made_up_group(rewards, failed=failed)
    assert advantages(group) == {}
    assert build_samples(of_groups(group)) == []


def test_only_groups_with_a_signal_become_samples():
    """Trap 13."""
    flat, alive = made_up_group([1.0, 1.0], id="0"), made_up_group([0.0, 1.0], id="1")
    samples = build_samples(of_groups(flat, alive))
    assert [sample.group for sample in samples] == ["1", "1"]


def test_a_failed_episode_counts_neither_in_mean_nor_in_deviation_and_is_no_sample():
    """Trap 14: the reward of the failed episode (0 by default, here 99) changes nothing."""
    group = made_up_group([1.0, 99.0, 2.0, 4.0], failed=[1])
    with_failure = advantages(group)
    without = advantages(made_up_group([1.0, 2.0, 4.0]))
    assert list(with_failure) == [0, 2, 3]
    assert list(with_failure.values()) == list(without.values())
    assert [sample.member for sample in build_samples(of_groups(group))] == [0, 2, 3]


def test_equal_prompts_in_two_groups_have_baselines_of_their_own():
    """Trap 15: the prompts have the same ids, so only the group's id separates them."""
    low, high = made_up_group([0.0, 1.0], id="0"), made_up_group([10.0, 11.0], id="1")
    assert low.episodes[0].turns[0].prompt_ids == high.episodes[0].turns[0].prompt_ids
    samples = build_samples(of_groups(low, high))
    assert [sample.group for sample in samples] == ["0", "0", "1", "1"]
    assert [sample.advantages[1] for sample in samples[:2]] == pytest.approx(
        [sample.advantages[1] for sample in samples[2:]]
    )


BOTH_TURNS = [[1.0, 4.0], [3.0, 6.0]]


@pytest.mark.parametrize(
    ("turn_rewards", "wholes", "discount", "expected"),
    [
        # The means are 2 in turn 0 and 5 in turn 1.
        (BOTH_TURNS, None, 0.0, {0: [-1.0, -1.0], 1: [1.0, 1.0]}),
        # The returns are [1 + 0.5 * 4, 4] and [3 + 0.5 * 6, 6].
        (BOTH_TURNS, None, 0.5, {0: [-1.5, -1.0], 1: [1.5, 1.0]}),
        # A turn that one member alone reached has no baseline.
        ([[1.0], [3.0, 9.0]], None, 0.0, {0: [-1.0], 1: [1.0, 0.0]}),
        # The part of the whole episode is added to every turn.
        (BOTH_TURNS, [0.0, 10.0], 0.0, {0: [-6.0, -6.0], 1: [6.0, 6.0]}),
    ],
)
def test_per_turn_rewards_are_compared_with_the_same_turn_of_the_others(
    turn_rewards, wholes, discount, expected
):
    group = turns_group(*turn_rewards, wholes=wholes)
    assert advantages(group, scale="none", discount=discount) == expected


def test_an_episode_without_a_trained_turn_counts_nowhere():
    """The prompt alone exceeded the token budget, or the model wrote nothing: there is a reward,
    but nothing to train on, and the others are not compared with it."""
    group = made_up_group([9.0, 0.0, 1.0, -9.0])
    group.episodes[0].turns = []
    group.episodes[0].status = Status.TOKEN_LIMIT
    group.episodes[3].turns = [made_up_turn([5], [])]
    assert advantages(group, scale="none") == {1: [-0.5], 2: [0.5]}
    assert [sample.member for sample in build_samples(of_groups(group))] == [1, 2]
    assert advantages(group, baseline="batch", scale="none") == {1: [-0.5], 2: [0.5]}
    del group.episodes[1]
    assert advantages(group) == {}


def test_a_masked_episode_is_compared_with_and_not_trained():
    """Trap 20: the last reply was cut off, or the next one did not fit. A reply that was cut off
    earlier, or a limit of turns, masks nothing."""
    group = made_up_group([3.0, 0.0, 0.0, 1.0])
    group.episodes[0].turns = [made_up_turn([5], [6, 7], finish=Finish.LENGTH)]
    group.episodes[1].turns.insert(0, made_up_turn([5], [6, 7], finish=Finish.LENGTH))
    group.episodes[2].status = Status.TOKEN_LIMIT
    group.episodes[3].status = Status.TURN_LIMIT
    (found,) = of_groups(group, scale="none")
    masked = found.without_truncated()
    assert [sample.member for sample in build_samples([masked])] == [1, 3]
    assert [masked.of(episode) for episode in group.episodes] == [None, [-1.0, -1.0], None, [0.0]]
    assert count_uncomputed([masked]) == Uncomputed(num_episodes=2, num_tokens=0)


def test_a_group_whose_advantages_are_all_masked_has_no_signal():
    group = made_up_group([1.0, 0.0])
    for episode in group.episodes:
        episode.turns = [made_up_turn([5], [6, 7], finish=Finish.LENGTH)]
    assert has_signal(group, discount=1.0, mask_truncated=False)
    assert not has_signal(group, discount=1.0, mask_truncated=True)


def test_a_reply_of_one_token_is_not_cut_off():
    """With env.max_reply_tokens=1 no reply has an end token, and all would be masked."""
    group = made_up_group([1.0, 0.0])
    for episode in group.episodes:
        episode.turns[-1].finish = Finish.LENGTH
    assert has_signal(group, discount=1.0, mask_truncated=True)
    assert not any(episode.truncated for episode in group.episodes)


def test_shipped_configurations_name_a_known_scale():
    """The code divides for every value but "none", so the schema has to reject unknown values."""
    with pytest.raises(ValueError, match="scale"):
        run_config({"trainer.advantage.scale": "variance"})
