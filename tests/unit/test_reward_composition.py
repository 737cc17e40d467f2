"""How the values of reward terms become the reward: transforms, the weighted sum, gates."""

import asyncio
import math
from types import SimpleNamespace

import pytest
from fakes import made_up_episode, made_up_turn
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv_pipe.config.schema import RewardConfig
from openenv_pipe.extras.report.sections import parts_tables
from openenv_pipe.rewards import Scorer
from openenv_pipe.rewards.composition import compose_rewards
from openenv_pipe.rewards.values import NoValue, TermValue
from openenv_pipe.types import Group, Judgement, Status

ENV = {"type": "env", "use": "sum", "weight": 1.0, "per_turn": False}
BY_TURN = ENV | {"per_turn": True}
LENGTH = {"type": "length", "weight": -0.5, "per_turn": False}
TURNS = LENGTH | {"type": "turns"}
STANDARDISE = [{"type": "standardise"}]
ONLY_SUCCESS = [{"type": "only_success"}]
MULTIPLY = [{"type": "multiply"}]


def clip(low, high):
    return [{"type": "clip", "low": low, "high": high}]


def scored(terms, transforms, rewards, *, statuses=None):
    """Score a group whose episodes have one turn for each of their rewards."""
    episodes = [
        made_up_episode(
            member=member,
            turns=[made_up_turn([5], [6] * (member + 1), reward=each) for each in by_turn],
            status=(statuses or {}).get(member, Status.DONE),
        )
        for member, by_turn in enumerate(rewards)
    ]
    group = Group(id="0", task=episodes[0].task, episodes=episodes)
    config = RewardConfig.model_validate({"terms": terms, "transforms": transforms})
    asyncio.run(Scorer(config, success_reward=1.0).score(group))
    return group


def rewards_of(group):
    return [episode.reward for episode in group.episodes]


def test_a_clipped_value_stays_in_its_range_and_the_term_is_reported_as_it_was():
    group = scored({"env": ENV | {"weight": 2.0}}, {"env": clip(0.0, 1.0)}, [[-3.0], [0.5], [9.0]])
    assert rewards_of(group) == [0.0, 1.0, 2.0]
    assert group.episodes[2].reward_terms == {"env": 9.0, "env/transformed": 1.0}


def test_one_end_of_a_range_may_be_open_and_turns_are_clipped_one_by_one():
    group = scored({"env": BY_TURN}, {"env": clip(None, 1.0)}, [[-3.0, 5.0, 0.5]])
    (episode,) = group.episodes
    assert episode.turn_rewards == [-3.0, 1.0, 0.5]
    assert (episode.reward, episode.whole_reward) == (-1.5, 0.0)


def test_a_term_can_count_for_successes_only():
    terms = {"env": ENV, "length": LENGTH, "turns": LENGTH | {"type": "turns", "per_turn": True}}
    transforms = {"length": ONLY_SUCCESS, "turns": ONLY_SUCCESS}
    group = scored(terms, transforms, [[0.5], [1.0]])
    assert rewards_of(group) == [0.5, 1.0 - 0.5 * 2 - 0.5]
    assert group.episodes[0].turn_rewards == [0.0]


def test_standardised_values_have_mean_0_and_deviation_1_in_each_group():
    group = scored({"env": ENV | {"weight": 3.0}}, {"env": STANDARDISE}, [[10.0], [20.0], [60.0]])
    deviation = math.sqrt((20.0**2 + 10.0**2 + 30.0**2) / 3)
    expected = [3.0 * each / deviation for each in (-20.0, -10.0, 30.0)]
    assert rewards_of(group) == pytest.approx(expected)


@pytest.mark.parametrize("rewards", [[[7.0]], [[7.0], [7.0]], [[0.1 + 0.2], [0.3]]])
def test_values_that_do_not_differ_are_standardised_to_0(rewards):
    group = scored({"env": ENV}, {"env": STANDARDISE}, rewards)
    assert rewards_of(group) == [0.0] * len(rewards)


def test_a_failed_episode_is_not_among_those_that_are_standardised():
    statuses = {1: Status.ERROR}
    group = scored({"env": ENV}, {"env": STANDARDISE}, [[1.0], [99.0], [3.0]], statuses=statuses)
    assert rewards_of(group) == [-1.0, 0.0, 1.0]


def test_transforms_are_applied_in_their_order():
    one = scored({"env": ENV}, {"env": STANDARDISE + clip(0.0, 9.0)}, [[1.0], [3.0]])
    other = scored({"env": ENV}, {"env": clip(0.0, 2.0) + STANDARDISE}, [[1.0], [3.0]])
    assert rewards_of(one) == [0.0, 1.0]
    assert rewards_of(other) == [-1.0, 1.0]


def test_a_gate_multiplies_all_that_is_added_also_what_comes_after_it():
    terms = {"gate": LENGTH | {"weight": 1.0}, "env": BY_TURN, "whole": ENV | {"weight": 10.0}}
    group = scored(terms, {"gate": clip(0.0, 1.5) + MULTIPLY}, [[1.0], [2.0]])
    first, second = group.episodes
    assert (first.reward, first.whole_reward, first.turn_rewards) == (11.0, 10.0, [1.0])
    assert (second.reward, second.whole_reward, second.turn_rewards) == (33.0, 30.0, [3.0])
    assert second.reward_terms["gate"] == 2.0


def test_several_gates_multiply_each_other():
    gate = LENGTH | {"weight": 1.0}
    group = scored({"a": gate, "b": gate, "env": ENV}, {"a": MULTIPLY, "b": MULTIPLY}, [[1.0]] * 3)
    assert rewards_of(group) == [1.0, 4.0, 9.0]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    rewards=st.lists(
        st.lists(st.floats(-9.0, 9.0), min_size=1, max_size=3), min_size=1, max_size=4
    ),
    transforms=st.lists(st.sampled_from([*clip(-1.0, 1.0), *ONLY_SUCCESS]), min_size=0, max_size=2),
)
def test_what_is_credited_adds_up_to_the_reward_whatever_is_done_to_it(rewards, transforms):
    terms = {"env": BY_TURN, "whole": ENV, "gate": LENGTH | {"weight": 1.0}}
    composed = {"env": transforms, "whole": transforms + STANDARDISE, "gate": MULTIPLY}
    for episode in scored(terms, composed, rewards).episodes:
        credited = episode.whole_reward + math.fsum(episode.turn_rewards)
        assert episode.reward == pytest.approx(credited, rel=1e-9, abs=1e-9)


def test_an_episode_without_a_value_is_left_out_of_what_others_are_compared_with():
    """A term's failure is no value of 0, neither for the episode nor for the mean of its group."""
    config = RewardConfig.model_validate(
        {"terms": {"a": ENV, "b": ENV}, "transforms": {"a": STANDARDISE}}
    )
    episodes = [made_up_episode(member=member) for member in range(4)]
    for episode in episodes:
        episode.reward = episode.whole_reward = 0.0
    group = Group(id="0", task=episodes[0].task, episodes=episodes)
    judged = TermValue(
        credits=[1.0], total=1.0, parts={"style": 0.5}, judgement=Judgement(explanation="good")
    )
    a = {member: TermValue(credits=[value], total=value) for member, value in enumerate([1, 3, 9])}
    values = {"a": a, "b": {0: judged, 2: NoValue(why="no answer"), 3: NoValue(why="none")}}
    compose_rewards(config, group, values)
    assert [each.unscored for each in episodes] == [
        *(None, None, "reward.terms.b: no answer", "reward.terms.b: none"),
    ]
    assert [each.reward for each in group.scored] == [-1.0 + 1.0, 1.0]
    assert episodes[0].reward_terms == {"a": 1, "b": 1.0, "b/style": 0.5, "a/transformed": -1.0}
    assert episodes[0].judgements == {"b": Judgement(explanation="good")}
    assert "b" not in episodes[1].reward_terms  # left out, as without a budget: no failure


def test_the_report_shows_every_part_with_its_beginning_and_end():
    config = RewardConfig.model_validate(
        {
            "terms": {"env": ENV | {"weight": 0.0}, "good": ENV, "safe": ENV},
            "transforms": {"good": ONLY_SUCCESS + clip(0.0, 1.0), "safe": MULTIPLY},
        }
    )
    records = [
        {"stage": "grpo", "step": step, "reward/mean": step, "reward/std": 9.0, "reward/env": 0.5}
        | {"reward/good/style": None if step < 3 else step / 10}
        | {"reward/safe": 1.0, "reward/good": 2.0}
        for step in range(20)
    ]
    alone = SimpleNamespace(beside={}, reward=config)
    assert parts_tables(alone, [{"stage": "warm_start", "reward/x": 1.0}, *records]).split(
        "\n"
    ) == [
        "## Reward by parts",
        "",
        "| part of the reward | counts | first 2 steps | last 2 steps |",
        "| --- | --- | --- | --- |",
        "| env | metric only | 0.500 | 0.500 |",
        "| good | × 1, after only success, clip | 2.000 | 2.000 |",
        "| good/style |  | – | 1.850 |",
        "| safe | multiplies | 1.000 | 1.000 |",
        "| **all** |  | 0.500 | 18.500 |",
    ]
    assert parts_tables(alone, []) == ""
    environments = {
        env: SimpleNamespace(env=SimpleNamespace(name="first"), reward=config)
        for env in ("", "other")
    }
    both = SimpleNamespace(beside={"other": None}, environments=environments)
    tables = parts_tables(
        both, [{"stage": "grpo", "environment/other/reward/env": 0.5, "reward/env": 9.0}]
    )
    assert tables.startswith("## Reward by parts: other\n")
    assert tables.endswith("| env | metric only | 0.500 | 0.500 |")


def test_a_term_of_weight_0_changes_no_reward_by_being_per_turn():
    with_it = scored({"env": BY_TURN | {"weight": 0.0}, "turns": TURNS}, {}, [[1.0], [0.0, 0.5]])
    without = scored({"turns": TURNS}, {}, [[1.0], [0.0, 0.5]])
    assert [each.turn_rewards for each in with_it.episodes] == [[], []]
    assert [each.turn_rewards for each in without.episodes] == [[], []]
    assert rewards_of(with_it) == rewards_of(without)
    assert [each.reward_terms["env"] for each in with_it.episodes] == [1.0, 0.5]


def test_a_term_of_weight_0_without_a_value_leaves_the_reward():
    group = Group(id="0", task=made_up_episode().task, episodes=[made_up_episode(member=0)])
    terms = {"env": ENV, "style": LENGTH | {"weight": 0.0}}
    config = RewardConfig.model_validate({"terms": terms, "transforms": {}})
    one = TermValue(credits=[1.0], total=1.0)
    values = {"env": {0: one}, "style": {0: NoValue(why="the episode has no style")}}
    compose_rewards(config, group, values)
    (episode,) = group.episodes
    assert (episode.reward, episode.unscored, episode.reward_terms) == (1.0, None, {"env": 1.0})
