"""The servers of blackjack, catch, game2048 and reasoning, driven over the WebSocket.

Tests here check what all four have in common; the tests of each game's rules are in `unit/`.
"""

import asyncio
import json
import random
import urllib.error
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from test_env_servers import Session, call, serve

pytest.importorskip("pyspiel")
pytest.importorskip("reasoning_gym")

import blackjack.policies
import catch.policies
import game2048.policies
import reasoning.policies


@dataclass(frozen=True, kw_only=True)
class Env:
    """An environment, a policy that plays it, and its differences from the others."""

    name: str
    policy: Callable[..., str]
    num_eval_tasks: int
    reset: dict[str, Any] = field(default_factory=dict)
    bad_resets: tuple[dict[str, Any], ...] = ()
    field: str = "action"


ENVS = [
    Env(name="blackjack", policy=blackjack.policies.random_action, num_eval_tasks=10_000),
    Env(
        name="catch",
        policy=catch.policies.random_move,
        num_eval_tasks=1000,
        bad_resets=({"rows": 5}, {"columns": "5"}),
    ),
    Env(
        name="game2048",
        policy=game2048.policies.random_move,
        num_eval_tasks=1000,
        reset={"max_moves": 10},
        bad_resets=({"max_moves": 0}, {"reward_scale": "large"}, {"reward_scale": 10**400}),
    ),
    Env(
        name="reasoning",
        policy=reasoning.policies.number_of_question,
        num_eval_tasks=1000,
        bad_resets=({"task": "riddles"}, {"task": "n_queens"}, {"config": {"size": 1}}),
        field="answer",
    ),
]


@pytest.fixture(scope="module", params=ENVS, ids=lambda env: env.name)
def served(request) -> Iterator[tuple[Env, int]]:
    with serve(f"{request.param.name}.server.app") as port:
        yield request.param, port


async def play(session: Session, env: Env, rng: random.Random, **reset: object) -> list[dict]:
    """Play one episode; return all answers, that of the reset first."""
    answers = [await session.send("reset", **env.reset, **reset)]
    assert answers[0]["reward"] is None and not answers[0]["done"]
    while not answers[-1]["done"]:
        reply = env.policy([answer["observation"] for answer in answers], rng)
        answers.append(await session.send("step", **{env.field: reply}))
    return answers


async def test_the_same_seed_gives_the_same_episode_in_every_session(served):
    env, port = served

    async with Session(port) as one, Session(port) as other:
        episodes = []
        for seed in range(10):
            same = [
                await play(session, env, random.Random(seed), seed=seed)
                for session in (one, other, one)
            ]
            assert same[0] == same[1] == same[2]
            episodes.append(json.dumps(same[0]))
        assert len(set(episodes)) > 3


async def test_sixteen_sessions_at_once_stay_apart(served):
    env, port = served

    async def one_session(index: int) -> list[list[dict]]:
        async with Session(port) as session:
            return [
                await play(session, env, random.Random(index), split="eval", index=index)
                for _ in range(3)
            ]

    together = await asyncio.gather(*(one_session(index) for index in range(16)))
    for index, episodes in enumerate(together):
        assert episodes == await one_session(index)


async def test_any_text_is_answered(served):
    env, port = served

    async with Session(port) as session:
        for text in ("", "north by northwest", "\0", "é" * 20_000, "1e999", "[[1], {}]"):
            await session.send("reset", **env.reset, index=0)
            reply = await session.send("step", **{env.field: text})
            assert reply["observation"]["message"]
            assert isinstance(reply["reward"], float)


async def test_a_step_before_reset_or_after_the_end_earns_nothing(served):
    env, port = served

    async with Session(port) as session:
        early = await session.send("step", **{env.field: "left"})
        assert (early["reward"], early["done"]) == (0.0, True)
        assert "Reset" in early["observation"]["message"]
        episode = await play(session, env, random.Random(0), index=0, episode_id="first")
        num_steps = len(episode) - 1
        again = await session.send("step", **{env.field: "left"})
        assert (again["reward"], again["done"]) == (0.0, True)
        state = await session.send("state")
        assert state == {"episode_id": "first", "step_count": num_steps}


async def test_bad_reset_arguments_are_rejected_and_the_session_goes_on(served):
    env, port = served
    bad_resets = ({"split": "test"}, {"split": []}, {"index": -1}, {"seed": "x"}, *env.bad_resets)

    async with Session(port) as session:
        for reset in bad_resets:
            error = await session.send("reset", **reset)
            assert error["code"] == "EXECUTION_ERROR"
            assert next(iter(reset)) in error["message"]
        assert await play(session, env, random.Random(0), split="eval")


def test_the_task_routes_count_the_tasks(served):
    env, port = served
    train, held_out = call(port, f"/{env.name}/splits")
    assert (train["name"], held_out["name"]) == ("train", "eval")
    assert held_out["num_tasks"] == env.num_eval_tasks
    last = {"split": "eval", "index": env.num_eval_tasks - 1}
    assert call(port, f"/{env.name}/num_tasks", {"split": "eval"}) == {
        "num_tasks": env.num_eval_tasks
    }
    assert call(port, f"/{env.name}/task", last)["task"] == last
    span = {"split": "train", "start": 2, "stop": 5}
    assert len(call(port, f"/{env.name}/task_range", span)["tasks"]) == 3
    for route, body in {
        "num_tasks": {"split": "x"},
        "task": {"split": "eval", "index": env.num_eval_tasks},
    }.items():
        with pytest.raises(urllib.error.HTTPError) as caught:
            call(port, f"/{env.name}/{route}", body)
        assert caught.value.code == 400
        caught.value.close()


async def test_the_dealers_hidden_card_and_right_answers_stay_secret(served):
    env, port = served

    async with Session(port) as session:
        for index in range(30):
            episode = await play(session, env, random.Random(index), index=index)
            seen = [answer["observation"] for answer in episode]
            if env.name == "blackjack":
                hidden = seen[-1]["dealer_cards"][0]
                assert hidden not in json.dumps(seen[:-1])
            if env.name == "reasoning":
                assert set(seen[0]) == {"task", "question", "message", "metadata"}
                assert not seen[0]["metadata"] and not seen[0]["message"]
                assert seen[-1] | {"message": ""} == seen[0]
