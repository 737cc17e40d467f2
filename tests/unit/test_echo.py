"""Echo's rules and its environment, without a server."""

import random
from collections import Counter

import pytest
from echo import policies, rules


@pytest.mark.parametrize(
    ("message", "value"),
    [
        ("c", 1.0),
        ("cccccccc", 1.0),
        ("", 0.0),
        ("C", 0.0),
        ("z", 0.2),
        ("ca", 0.6),
        ("c ", 0.5),
        ("\ufffd\ufffd\ufffdc", 0.25),
        ("é", 0.0),
    ],
)
def test_score_is_the_mean_over_characters(message, value):
    assert rules.score(message, "c") == pytest.approx(value)


def test_random_bytes_earn_little_but_not_always_the_same():
    rng = random.Random(0)
    values = [rules.score(rng.randbytes(8).decode(errors="replace"), "c") for _ in range(2000)]
    assert 0.02 < sum(values) / len(values) < 0.04
    assert 0.3 < sum(value > 0 for value in values) / len(values) < 0.7


def test_scripted_players_earn_what_the_readme_says():
    rng = random.Random(0)
    observation = [{"letter": "c"}]
    assert rules.score(policies.perfect(observation, rng), "c") == 1.0
    values = [rules.score(policies.random_letters(observation, rng), "c") for _ in range(2000)]
    assert sum(values) / len(values) == pytest.approx(0.23, abs=0.01)


def test_tasks_are_fixed_and_ask_for_every_letter_equally_often():
    for split, num_tasks in rules.NUM_TASKS.items():
        tasks = [rules.choose_letters(split, index, None) for index in range(num_tasks)]
        assert tasks == [rules.choose_letters(split, index, seed=1) for index in range(num_tasks)]
        assert set(Counter(task[0] for task in tasks).values()) == {num_tasks // 5}
    assert rules.choose_letters("train", None, 7) == rules.choose_letters("train", None, 7)
