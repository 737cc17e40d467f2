"""How a judge's values are compared with the environment's reward, with known answers."""

import math
import random

import pytest

from openenv_pipe.algorithms.agreement import agreement_of, pairwise_auc, rank_correlation
from openenv_pipe.types import Episode, Finish, Group, Judgement, Status, Step, Task, Turn

TASK = Task(id="train/0", split="train", index=0, seed=1)


def episode(
    member: int,
    reward: float,
    value: float,
    *,
    num_tokens: int = 3,
    positions: tuple[float, ...] = (),
    scores: tuple[float, ...] = (),
) -> Episode:
    turn = Turn(
        prompt_ids=[1],
        completion_ids=[2] * num_tokens,
        logprobs=[0.0] * num_tokens,
        finish=Finish.STOP,
        policy_versions=[0],
        reply="b",
        steps=[Step(action={}, observation={}, reward=reward)],
    )
    said = Judgement(explanation="", positions=list(positions), scores=list(scores))
    return Episode(
        task=TASK,
        member=member,
        seed=member,
        turns=[turn],
        status=Status.DONE,
        reward_terms={"ruler": value},
        judgements={"ruler": said},
    )


def group(*episodes: Episode) -> Group:
    return Group(id="step 1/0", task=TASK, episodes=list(episodes))


def test_the_rank_correlation_is_spearmans():
    source = random.Random(0)
    for _ in range(20):
        values, truth = source.sample(range(8), 8), source.sample(range(8), 8)
        squares = sum((a - b) ** 2 for a, b in zip(values, truth, strict=True))
        expected = 1 - 6 * squares / (8 * 63)  # the formula for ranks without ties
        assert rank_correlation(values, truth) == pytest.approx(expected)
    tied = rank_correlation([0.0, 0.5, 0.5, 1.0], [1.0, 2.0, 3.0, 4.0])
    assert tied == pytest.approx(0.9**0.5)  # ranks 0, 1.5, 1.5, 3 and 0, 1, 2, 3
    assert rank_correlation([0.5, 0.5], [0.0, 1.0]) == 0.0
    assert rank_correlation([0.0, 1.0], [0.5, 0.5]) is None


def test_the_auc_is_the_share_of_pairs_in_the_right_order():
    assert pairwise_auc([0.1, 0.2, 0.3], [0.0, 0.0, 1.0]) == 1.0
    assert pairwise_auc([0.1, 0.4, 0.3], [0.0, 0.0, 1.0]) == 0.5
    assert pairwise_auc([0.3, 0.1, 0.3], [0.0, 0.0, 1.0]) == 0.75  # a tie counts half
    assert pairwise_auc([0.3, 0.2, 0.1], [0.0, 0.5, 1.0]) == 0.0
    assert pairwise_auc([0.1, 0.9], [1.0, 1.0]) is None


def test_a_judge_that_agrees_and_one_that_says_the_opposite():
    good = group(*(episode(n, reward=n / 4, value=n / 8) for n in range(5)))
    bad = group(*(episode(n, reward=n / 4, value=1 - n / 8) for n in range(5)))
    found = agreement_of([good, bad], "ruler")
    assert found["rank_correlation"] == pytest.approx([1.0, -1.0])
    assert found["auc"] == [1.0, 0.0]


def test_without_differences_of_the_reward_there_is_no_agreement():
    equal = group(*(episode(n, reward=1.0, value=n / 8) for n in range(5)))
    assert agreement_of([equal], "ruler") == {}
    assert agreement_of([equal], "another") == {}


def test_episodes_that_failed_or_have_no_verdict_are_left_out():
    unscored, unjudged = episode(3, 1.0, 0.0), episode(4, 1.0, 0.0)
    unscored.unscored, unjudged.judgements = "no verdict", {}
    judged = group(episode(0, 0.0, 0.0), episode(1, 1.0, 1.0), unscored, unjudged)
    assert agreement_of([judged], "ruler")["auc"] == [1.0]


def test_a_preference_for_length_is_what_the_reward_does_not_explain():
    by_length = group(*(episode(n, n % 2, value=n / 8, num_tokens=n + 1) for n in range(8)))
    by_reward = group(*(episode(n, n / 8, value=n / 8, num_tokens=n + 1) for n in range(8)))
    biased, fair = agreement_of([by_length, by_reward], "ruler")["length_bias"]
    assert biased > 0.5
    assert fair == pytest.approx(0.0)


def test_the_position_bias_is_the_slope_of_an_episode_over_its_orders():
    def placed(member: int, *positions: float) -> Episode:
        scores = tuple(member / 4 + 0.3 * position for position in positions)
        return episode(member, 0.0, scores[0], positions=positions, scores=scores)

    several = group(placed(0, 0.0, 1.0), placed(1, 0.5, 0.0), placed(2, 1.0, 0.5))
    assert agreement_of([several], "ruler")["position_bias"] == pytest.approx([0.3])
    same = group(placed(0, 0.0, 0.0), placed(1, 1.0, 1.0))
    assert "position_bias" not in agreement_of([same], "ruler")


def test_with_one_order_positions_are_compared_within_the_group():
    places = random.Random(2).sample(range(5), 5)
    one = group(
        *(
            episode(n, 0.0, place / 8, positions=(place / 4,), scores=(place / 8,))
            for n, place in enumerate(places)
        )
    )
    (slope,) = agreement_of([one], "ruler")["position_bias"]
    assert math.isclose(slope, 0.5)
