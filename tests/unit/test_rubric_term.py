"""The reward term `rubric`: numbers of observations, with weights and gates."""

import asyncio

import pytest
from fakes import made_up_episode, made_up_turn

from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.rewards import Scorer
from openenv_pipe.rollout.metrics import summarise_groups
from openenv_pipe.types import Group, Step

FIRST = {"metadata": {"rubric_scores": {"style": 0.1, "safe": True}}, "board": {"score": 3}}
LAST = {"metadata": {"rubric_scores": {"style": 0.5, "right": {"answer": 2.0}}}}


def scored(*observations, overrides=()):
    """Score an episode with these observations by the shipped reward and some changes."""
    config = compose(["conf=echo", "reward=rubric", *overrides]).config
    steps = [Step(action={}, observation=each, reward=0.25) for each in observations]
    episode = made_up_episode(turns=[made_up_turn([5], [6], steps=[step]) for step in steps])
    group = Group(id="0", task=episode.task, episodes=[episode])
    asyncio.run(Scorer(config.reward, 1.0).score(group))
    return episode


def change(**keys):
    return [f"reward.terms.rubric.{key}={value}" for key, value in keys.items()]


def test_all_rubrics_are_added_up_each_with_its_last_score():
    episode = scored(FIRST, LAST)
    assert episode.reward == 0.5 + 1.0 + 2.0
    assert episode.reward_terms == {
        "rubric": 3.5,
        "rubric/style": 0.5,
        "rubric/safe": 1.0,
        "rubric/right.answer": 2.0,
        "env": 0.5,
    }
    group = Group(id="0", task=episode.task, episodes=[episode])
    assert summarise_groups([group])["reward/rubric/right.answer"] == 2.0


def test_rubrics_and_fields_have_weights_and_gates():
    given = change(weights="{style: 2.0, board.score: 0.1}", gates="[right.answer]")
    episode = scored(FIRST, LAST, overrides=given)
    assert episode.reward == pytest.approx((2.0 * 0.5 + 0.1 * 3.0) * 2.0)
    assert episode.reward_terms["rubric/board.score"] == 3.0
    assert episode.reward_terms["rubric/safe"] == 1.0  # a metric only


def test_each_of_many_scores_counts():
    many = {"metadata": {"rubric_scores": {f"r{number}": 1 for number in range(100)}}}
    assert scored(many).reward == 100.0
    weighted = scored(many, overrides=change(weights="{r99: 2.0}"))
    assert weighted.reward == 2.0
    parts = [name for name in weighted.reward_terms if name.startswith("rubric/")]
    assert len(parts) == 64 and "rubric/r99" in parts, "each is a metric"


@pytest.mark.parametrize("scores", [{}, {"style": "good"}, {"style": None}, {"style": 1e300}])
@pytest.mark.parametrize("weights", ["null", "{style: 2.0}"])
def test_a_number_that_is_not_reported_is_what_the_configuration_says(scores, weights):
    observation = {"metadata": {"rubric_scores": scores}}
    zero = scored(observation, overrides=change(weights=weights))
    assert (zero.reward, zero.is_scored) == (0.0, True)
    other = scored(observation, overrides=change(weights=weights, when_missing=-1.0))
    assert other.reward == (-1.0 if weights == "null" else -2.0)
    none = scored(observation, overrides=change(weights=weights, when_missing="null"))
    assert none.unscored.startswith("reward.terms.rubric: the environment has reported no s")
    assert "rubric" not in none.reward_terms


def test_a_missing_gate_counts_as_missing():
    episode = scored(LAST, overrides=change(gates="[safe]", when_missing=0.5))
    assert episode.reward == 2.5 * 0.5


def test_a_sum_that_is_too_large_is_rejected():
    with pytest.raises(ConfigError, match=r"reward\.terms\.rubric gave"):
        scored(
            {"metadata": {"rubric_scores": {"style": 1e15}}},
            overrides=change(weights="{style: 1000.0}"),
        )
