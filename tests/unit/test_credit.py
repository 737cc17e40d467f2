"""Rewards of turns that are not trained, and advantages of episodes that have such turns."""

import asyncio
import dataclasses

import pytest
from fakes import made_up_episode, made_up_turn
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv_pipe.algorithms.advantages import has_signal, step_advantages
from openenv_pipe.algorithms.custom_advantages import UserAdvantages
from openenv_pipe.algorithms.samples import build_samples
from openenv_pipe.config.schema import PythonAdvantageConfig, RewardConfig
from openenv_pipe.rewards import Scorer
from openenv_pipe.types import Group, TurnRole

TURN_REWARDS = st.sampled_from([-1.0, 0.0, 0.25, 2.0])


@st.composite
def turn_graphs(draw):
    """An episode's turns in any graph, with any roles, and some without a token."""
    turns = []
    for index in range(draw(st.integers(0, 6))):
        turns.append(
            made_up_turn(
                [1],
                draw(st.sampled_from([[2], [2, 3], []])),
                reward=draw(TURN_REWARDS),
                parent=draw(st.sampled_from([None, *range(index)])),
                role=draw(st.sampled_from(TurnRole)),
            )
        )
    return turns


@st.composite
def scored_groups(draw, per_turn):
    """One or two groups of such episodes, scored by a term of each kind."""
    terms = {
        "env": {"type": "env", "use": "sum", "weight": 1.0, "per_turn": per_turn},
        "length": {"type": "length", "weight": 0.5, "per_turn": draw(st.booleans())},
        "turns": {"type": "turns", "weight": -0.25, "per_turn": False},
    }
    config = RewardConfig.model_validate({"terms": terms, "transforms": {}})
    groups = []
    for number in range(draw(st.integers(1, 2))):
        episodes = [made_up_episode(member=member) for member in range(draw(st.integers(2, 4)))]
        for episode in episodes:
            episode.turns = draw(turn_graphs())
        groups.append(Group(id=str(number), task=episodes[0].task, episodes=episodes))
        asyncio.run(Scorer(config, 1.0).score(groups[-1]))
    return groups


def is_trained(turn):
    return turn.role is TurnRole.AGENT and bool(turn.completion_ids)


def without_untrained_turns(group):
    """The same group as if its untrained turns had never been, with the same rewards."""
    episodes = []
    for episode in group.episodes:
        kept = [index for index, turn in enumerate(episode.turns) if is_trained(turn)]
        if kept:
            changed = dataclasses.replace(
                episode,
                turns=[made_up_turn([1], [2]) for _ in kept],
                turn_rewards=[episode.turn_rewards[index] for index in kept]
                if episode.turn_rewards
                else [],
            )
            episodes.append(changed)
    return Group(id=group.id, task=group.task, episodes=episodes)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(scored_groups(per_turn=True))
def test_trained_turns_are_credited_with_all_rewards(groups):
    """In any graph of turns: no reward is lost at a turn that is not trained."""
    for episode in (episode for group in groups for episode in group.episodes):
        credited = list(zip(episode.turns, episode.turn_rewards, strict=True))
        trained = [reward for turn, reward in credited if is_trained(turn)]
        if trained:
            assert sum(trained) + episode.whole_reward == pytest.approx(episode.reward)
            assert not any(reward for turn, reward in credited if not is_trained(turn))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.booleans().flatmap(lambda per_turn: scored_groups(per_turn=per_turn)),
    st.sampled_from(["group", "leave_one_out", "batch"]),
    st.sampled_from(["group", "batch", "none"]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_untrained_turns_change_no_advantage(groups, baseline, scale, discount):
    """Returns, baselines, divisors and the signal are those of the trained turns alone."""
    chosen = {"baseline": baseline, "scale": scale, "discount": discount}
    found = step_advantages(groups, **chosen)
    expected = step_advantages([without_untrained_turns(group) for group in groups], **chosen)
    for one, other in zip(found, expected, strict=True):
        assert one.has_signal == other.has_signal
        assert list(one.by_member) == list(other.by_member)
        for episode in one.compared if one.has_signal else []:
            values = list(zip(episode.turns, one.by_member[episode.member], strict=True))
            trained = [value for turn, value in values if is_trained(turn)]
            assert trained == pytest.approx(other.by_member[episode.member])
            assert not any(value for turn, value in values if not is_trained(turn))
    has_gradient = {
        sample.group for sample in build_samples(found) if any(map(abs, sample.advantages))
    }
    assert has_gradient == {each.group.id for each in found if each.has_signal}
    if baseline == "group" and scale == "none":
        for each in found:
            assert (
                has_signal(each.group, discount=discount, mask_truncated=False) == each.has_signal
            )


@pytest.mark.parametrize("discount", [0.0, 1.0])
@pytest.mark.parametrize("role", [TurnRole.RETRY, TurnRole.AUXILIARY])
def test_a_step_after_an_untrained_call_is_credited_to_the_trained_one_before_it(role, discount):
    """A program that asks for a title, or for a second sample, before it takes the step."""
    episodes = []
    for member, reward in enumerate((0.0, 1.0)):
        turns = [made_up_turn([1], [2]), made_up_turn([1], [3], reward=reward, parent=None)]
        turns[1].role = role
        episodes.append(
            made_up_episode(reward, member=member, turns=turns, turn_rewards=[0, reward])
        )
    group = Group(id="0", task=episodes[0].task, episodes=episodes)
    (found,) = step_advantages([group], baseline="group", scale="none", discount=discount)
    assert found.by_member == {0: [-0.5, 0.0], 1: [0.5, 0.0]}
    assert has_signal(group, discount=discount, mask_truncated=False)


def of_the_second_turn(groups):
    return [[[0, 1], [0, -1]] for _ in groups]


def test_a_difference_between_untrained_turns_alone_is_no_signal():
    """Custom advantages give every turn a number, also those that are in no loss."""
    turns = [made_up_turn([1], [2]), made_up_turn([1], [3], role=TurnRole.RETRY)]
    episodes = [made_up_episode(member=member, turns=turns) for member in range(2)]
    group = Group(id="0", task=episodes[0].task, episodes=episodes)
    target = f"{__name__}:of_the_second_turn"
    config = PythonAdvantageConfig(type="python", target=target, options={})
    (found,) = UserAdvantages(config)([group])
    assert not found.has_signal
    assert build_samples([found]) == []
