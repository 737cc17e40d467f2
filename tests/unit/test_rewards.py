"""Reward terms and their sum."""

import asyncio
import copy
import math
import threading
from collections import namedtuple
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from fakes import made_up_episode, made_up_turn
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import RewardConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.rewards import Scorer
from openenv_pipe.rewards import python_term as python_term_module
from openenv_pipe.rewards.terms import BrevityOfGroup
from openenv_pipe.types import Group, Status, Step, Task


def scored(terms, *, success_reward=1.0, status=Status.DONE, turns=None):
    """An episode of two turns, the second one unusable, scored with these terms."""
    if turns is None:
        turns = [
            made_up_turn([5], [6, 7, 8], reward=0.25, reply="crane"),
            made_up_turn([5], [6], reward=0.5, reply="?!", unusable="not a word"),
        ]
    episode = made_up_episode(turns=turns, status=status)
    episode.turns = list(turns)
    terms = {name: {"weight": 1.0, "per_turn": False} | values for name, values in terms.items()}
    config = RewardConfig.model_validate({"terms": terms, "transforms": {}})
    group = Group(id="0", task=episode.task, episodes=[episode])
    asyncio.run(Scorer(config, success_reward).score(group))
    return episode


def python_term(function, *, use="sum", **keywords):
    target = f"{__name__}:{function}"
    return {"type": "python", "target": target, "keywords": keywords, "use": use}


def halves(episode, *, share):
    return [share * len(turn.completion_ids) for turn in episode.turns]


def number(episode, *, value):
    return value


def of_trl(completions, **columns):
    return [0.0 for _ in completions]


async def later(episode, *, value):
    await asyncio.sleep(0)
    return [value] * len(episode.turns)


async def endless_wait(episode):
    await asyncio.Event().wait()


PER_TURN = python_term("halves", share=0.5)
A_NUMBER = python_term("number", value=4)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(70, 0.0), (80, 0.0), (85, -0.25), (95, -0.75), (100, -1.0), (130, -1.0)],
)
def test_overlong_falls_from_the_buffer_to_the_limit(num_tokens, expected):
    """All tokens count: the limit that cuts an episode counts them too."""
    turns = [made_up_turn([5] * 40, [6] * (num_tokens - 40))]
    term = {"type": "overlong", "limit_tokens": 100, "buffer_share": 0.2}
    assert scored({"it": term}, turns=turns).reward == pytest.approx(expected)


@pytest.mark.parametrize(
    ("lengths", "successes", "expected"),
    [
        ([10, 20, 30, 15], [True, True, True, False], [0.5, 0.0, -0.5, 0.0]),
        ([10, 20, 30, 25], [False, True, False, False], [0.0, 0.0, -0.5, -0.25]),
        ([7, 7], [True, False], [0.0, 0.0]),
        ([7], [True], []),
    ],
)
async def test_brevity_is_relative_to_the_group(lengths, successes, expected):
    """By hand, by section 2.3.3 of arXiv:2501.12599: 0.5 - (length - min) / (max - min)."""
    episodes = []
    for member, (length, success) in enumerate(zip(lengths, successes, strict=True)):
        turns = [made_up_turn([5], [6] * (length - 3)), made_up_turn([5], [6] * 3)]
        episodes.append(made_up_episode(member=member, turns=turns))
        episodes[-1].success = success
    failed = made_up_episode(member=9, turns=[made_up_turn([5], [6] * 99)], status=Status.ERROR)
    group = Group(id="0", task=failed.task, episodes=[*episodes, failed])
    config = compose(["conf=wordle", "reward=[wordle,brevity]"]).config.reward
    assert config.relative == ["brevity"]
    term = BrevityOfGroup("brevity", config.terms["brevity"], sources=None)
    found = await term.values(group)
    assert [found[member].total for member in sorted(found)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("term", "values"),
    [
        ({"type": "env", "use": "sum"}, [0.25, 0.5]),
        ({"type": "env", "use": "last"}, [0.0, 0.5]),
        ({"type": "success"}, [0.0, 0.0]),
        ({"type": "turns"}, [1.0, 1.0]),
        ({"type": "unusable"}, [0.0, 1.0]),
        ({"type": "length"}, [3.0, 1.0]),
        ({"type": "regex", "pattern": "^[a-z]+$"}, [1.0, 0.0]),
        ({"type": "overlong", "limit_tokens": 8, "buffer_share": 0.5}, [0.0, -0.5]),
        (PER_TURN, [1.5, 0.5]),
        (A_NUMBER, [0.0, 4.0]),
        (python_term("later", value=0.5), [0.5, 0.5]),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_each_term(term, values):
    """Its value of the episode is the sum over the turns; `per_turn` shares it out."""
    episode = scored({"it": term | {"weight": -2.0}})
    assert episode.reward_terms == {"it": sum(values)}
    assert episode.reward == episode.whole_reward == -2.0 * sum(values)
    assert episode.turn_rewards == []
    by_turn = scored({"it": term | {"weight": -2.0, "per_turn": True}})
    assert (by_turn.reward, by_turn.whole_reward) == (episode.reward, 0.0)
    assert by_turn.turn_rewards == [-2.0 * value for value in values]


def test_the_reward_is_the_weighted_sum_and_turns_get_their_part_of_it():
    episode = scored(
        {
            "env": {"type": "env", "use": "sum", "weight": 4.0},
            "bad": {"type": "unusable", "weight": -1.0, "per_turn": True},
            "length": {"type": "length", "weight": 0.5, "per_turn": True},
        }
    )
    assert episode.reward == 4.0 * 0.75 - 1.0 + 0.5 * 4
    assert episode.whole_reward == 4.0 * 0.75
    assert episode.turn_rewards == [1.5, -0.5]
    assert episode.reward_terms == {"env": 0.75, "bad": 1.0, "length": 4.0}


def test_the_mean_over_turns_can_be_a_terms_value():
    episode = scored({"it": python_term("halves", use="mean", share=0.5)})
    assert (episode.reward, episode.whole_reward, episode.turn_rewards) == (1.0, 1.0, [])


@pytest.mark.parametrize("name", ["mean", "std"])
def test_a_term_cannot_have_the_name_of_a_metric_of_the_whole_reward(name):
    with pytest.raises(ValidationError, match=f"reward/{name}"):
        scored({name: {"type": "turns"}})


TURNS_TERM = {"type": "turns", "weight": 1.0, "per_turn": False}


def values_of(episode, *, values):
    return values[: len(episode.turns)]


TERMS = st.one_of(
    st.sampled_from(
        [
            {"type": "env", "use": "sum"},
            {"type": "env", "use": "last"},
            {"type": "success"},
            {"type": "turns"},
            {"type": "unusable"},
            {"type": "length"},
            {"type": "regex", "pattern": "e"},
            {"type": "overlong", "limit_tokens": 6, "buffer_share": 0.5},
            A_NUMBER,
        ]
    ),
    st.builds(
        lambda values, use: python_term("values_of", use=use, values=values),
        st.lists(st.floats(-10.0, 10.0), min_size=4, max_size=4),
        st.sampled_from(["sum", "mean"]),
    ),
)


@st.composite
def weighted_terms(draw):
    """One to four terms of any kind, each credited by turn or to the episode as a whole."""
    terms = {}
    for number in range(draw(st.integers(1, 4))):
        term = draw(TERMS)
        per_turn = term.get("use") != "mean" and draw(st.booleans())
        terms[f"term_{number}"] = term | {
            "weight": draw(st.floats(-5.0, 5.0)),
            "per_turn": per_turn,
        }
    return terms


TURNS = st.lists(
    st.builds(
        lambda length, reward, reply, unusable: made_up_turn(
            [5], [6] * length, reward=reward, reply=reply, unusable=unusable
        ),
        st.integers(1, 4),
        st.floats(-1.0, 1.0),
        st.sampled_from(["crane", "?!"]),
        st.sampled_from([None, "not a word"]),
    ),
    max_size=4,
)


@given(terms=weighted_terms(), turns=TURNS)
def test_the_logged_reward_is_what_is_credited(terms, turns):
    """What turns and the episode are credited with adds up to the reward in metrics.jsonl."""
    episode = scored(terms, turns=turns)
    credited = episode.whole_reward + math.fsum(episode.turn_rewards)
    assert episode.reward == pytest.approx(credited, rel=1e-9, abs=1e-9)


def test_a_number_for_the_episode_has_no_mean_over_turns():
    with pytest.raises(ConfigError, match="use=sum"):
        scored({"it": python_term("number", use="mean", value=4)})


def test_a_function_of_trl_is_named_as_one():
    with pytest.raises(ConfigError, match=r"as functions of TRL do; here .* def score\(episode\)"):
        scored({"it": python_term("of_trl")})


@pytest.mark.parametrize(("threshold", "success"), [(0.75, True), (0.76, False)])
def test_success_is_the_environments_reward_reaching_its_threshold(threshold, success):
    episode = scored({"win": {"type": "success"}}, success_reward=threshold)
    assert episode.success is success
    assert episode.reward == float(success)


def test_a_failed_episode_is_left_unscored():
    """Trap 14: it counts nowhere, so it must not carry a reward either."""
    episode = scored({"turns": {"type": "turns"}}, status=Status.ERROR)
    assert (episode.reward, episode.reward_terms, episode.turn_rewards) == (0.0, {}, [])


@pytest.mark.parametrize(
    "term", [{"type": "env", "use": "last"}, {"type": "success"}, {"type": "length"}]
)
def test_an_episode_without_turns_has_a_reward_of_zero(term):
    episode = scored({"it": term}, turns=[], status=Status.TOKEN_LIMIT)
    assert episode.reward == 0.0


def returned(name, **term):
    """Return the value of the term with a function that returns one of RETURNED."""
    return scored({"it": python_term("named_value", name=name, **term)}).reward_terms["it"]


def named_value(episode, *, name):
    return RETURNED[name]() if callable(RETURNED[name]) else RETURNED[name]


Pair = namedtuple("Pair", ["correct", "style"])
RETURNED = {
    "an int": 2,
    "a bool": True,
    "a bool of numpy": np.bool_(True),
    "a float of numpy": np.float16(0.5),
    "an array without dimensions": np.array(0.5),
    "a tensor without dimensions": torch.tensor(0.5, dtype=torch.bfloat16),
    "a tensor with a gradient": torch.tensor(0.5, requires_grad=True),
    "a Decimal": Decimal("0.5"),
    "a Fraction": Fraction(1, 2),
    "a list": [1, 0.5],
    "a tuple": (np.bool_(True), Decimal("0.5")),
    "an array": np.array([1.0, 0.5]),
    "a tensor": torch.tensor([1.0, 0.5]),
    # What cannot be a value:
    "a text": "12",
    "bytes": b"12",
    "a set": {1.0, 2.0},
    "a dict": {0: 1.0, 1: 2.0},
    "a generator": lambda: (1.0 for _ in range(2)),
    "a range": range(2),
    "a named tuple": Pair(1.0, 0.5),
    "a complex number": 1j,
    "a text of numpy": np.str_("1"),
    "a time of numpy": np.timedelta64(1),
    "a list in a list": [[1.0], [2.0]],
    "two dimensions": torch.ones(2, 1),
    "texts": ["1", "2"],
    "None among numbers": [None, 1.0],
    "seven numbers": [0.0] * 7,
    "NaN": math.nan,
    "infinity": np.float32("inf"),
    "NaN in a tensor": torch.tensor([0.0, math.nan]),
    "a Decimal that is none": Decimal("sNaN"),
    "a number without end": 10**400,
    "a huge number": [1e308, 1e308],
}
VALUES = dict.fromkeys(list(RETURNED)[:13], 0.5) | {
    "an int": 2.0,
    "a bool": 1.0,
    "a bool of numpy": 1.0,
    **dict.fromkeys(["a list", "a tuple", "an array", "a tensor"], 1.5),
}


@pytest.mark.parametrize("name", VALUES)
def test_every_kind_of_number_is_a_value(name):
    assert returned(name) == VALUES[name]


@pytest.mark.parametrize("name", [name for name in RETURNED if name not in VALUES])
def test_what_is_no_number_is_rejected_with_its_target_task_and_value(name):
    """Trap 7: NaN is reported, never averaged away."""
    with pytest.raises(ConfigError) as rejected:
        returned(name)
    value = RETURNED[name]
    seen = "generator object" if callable(value) else " ".join(repr(value).split())[:20]
    for word in ("reward.terms.it.target='test_rewards:named_value'", "task train/0", seen):
        assert word in str(rejected.value)


RAISED = {
    "CancelledError": asyncio.CancelledError(),
    "SystemExit": SystemExit(0),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "GeneratorExit": GeneratorExit(),
    "StopIteration": StopIteration(1.0),
    "StopAsyncIteration": StopAsyncIteration(),
    "TimeoutError": TimeoutError("no answer"),
    "BaseExceptionGroup": BaseExceptionGroup("two", [SystemExit(0), ValueError("x")]),
}


def raiser(episode, *, name):
    raise RAISED[name]


async def later_raiser(episode, *, name):
    await asyncio.sleep(0)
    raise RAISED[name]


async def cancels_itself(episode, *, name):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("function", "name"),
    [*product(["raiser", "later_raiser"], RAISED), ("cancels_itself", "CancelledError")],
)
def test_whatever_a_function_raises_is_an_error_with_its_name(function, name):
    """A CancelledError gave the whole group the reward 0, and SystemExit the exit code 0."""
    kind = "CancelledError" if name == "CancelledError" else ""
    with pytest.raises(ConfigError, match=kind or "raised") as raised:
        scored({"it": python_term(function, name=name)})
    assert f"reward.terms.it.target='test_rewards:{function}'" in str(raised.value)


def spoiler(episode):
    """Change everything that it is given."""
    episode.task.reset["answer"]["k"].append(9)
    episode.first_observation["text"] = "forged"
    episode.turns[0].steps[0].observation["seen"].append("forged")
    episode.turns[0].completion_ids.append(7)
    episode.turns[0].logprobs[0] = 0.0
    episode.turns.pop()
    episode.reward_terms.clear()
    episode.status = Status.ERROR
    return 1.0


def test_a_function_changes_nothing_of_the_episode():
    task = Task(id="train/0", split="train", index=0, seed=0, reset={"answer": {"k": [1]}})
    turn = made_up_turn([5], [6, 7])
    turn.steps[0] = Step(action={}, observation={"seen": ["a"]}, reward=0.0)
    played = replace(made_up_episode(turns=[turn, made_up_turn([5], [6])]), task=task)
    played.first_observation = {"text": "real"}
    before = copy.deepcopy(played)
    terms = {name: python_term("spoiler") | {"weight": 1.0, "per_turn": False} for name in "ab"}
    config = RewardConfig.model_validate({"terms": terms, "transforms": {}})
    asyncio.run(Scorer(config, 1.0).score(Group(id="0", task=task, episodes=[played])))
    assert (played.reward, played.reward_terms) == (2.0, {"a": 1.0, "b": 1.0})
    scores = {"reward": 0.0, "whole_reward": 0.0, "reward_terms": {}}
    assert replace(played, **scores) == replace(before, **scores)


def test_a_function_that_returns_none_leaves_the_episode_without_a_reward():
    episode = scored({"it": python_term("number", value=None), "turns": TURNS_TERM})
    assert episode.unscored == "reward.terms.it: its function returned None"
    assert not episode.is_scored


def busy(episode):
    threading.Event().wait(3600)


@pytest.mark.parametrize("function", ["endless_wait", "busy"])
def test_a_function_that_never_returns_ends_the_run(monkeypatch, function):
    monkeypatch.setattr(python_term_module, "LIMIT_S", 0.1)
    with pytest.raises(ConfigError, match=rf"{function}' has not returned within 0\.1 s"):
        scored({"it": python_term(function)})


def test_an_episode_with_a_reply_that_takes_too_long_to_match_has_no_reward():
    term = {"type": "regex", "pattern": r"^(a|aa)+$"}
    turns = [made_up_turn([5], [6], reply=reply) for reply in ("a" * 60 + "!", "aa")]
    episode = scored({"it": term}, turns=turns)
    assert episode.unscored.startswith("reward.terms.it: a text of 61 characters cannot be matched")
    assert episode.reward_terms == {}


def test_a_pattern_that_is_none_is_rejected_at_the_start():
    with pytest.raises(ConfigError, match=r"reward\.terms\.it\.pattern"):
        scored({"it": {"type": "regex", "pattern": "("}})
