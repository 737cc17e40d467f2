"""The servers of envs/, each in a process of its own, driven over the WebSocket.

Most tests check what the servers have in common; those of each game's rules are in `unit/`.
"""

import asyncio
import importlib
import json
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from echo import policies as echo_policies
from websockets.asyncio.client import connect
from wordle import rules

from tests.ports import lasting_port

FOLDER = Path(__file__).parents[2] / "envs"
LIMIT_S = 240.0  # for each wait


@contextmanager
def serve(*command: str) -> Iterator[int]:
    """Run `python -m <command> --port <free port>` in envs/ for the block, and yield the port."""
    port = lasting_port()
    process = subprocess.Popen([sys.executable, "-m", *command, "--port", str(port)], cwd=FOLDER)
    try:
        deadline = time.monotonic() + LIMIT_S
        while not is_healthy(port):
            assert process.poll() is None, f"the server ended with code {process.returncode}"
            assert time.monotonic() < deadline, "the server did not become healthy"
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def is_healthy(port: int) -> bool:
    try:
        return call(port, "/health") == {"status": "healthy"}
    except OSError:
        return False


def call(port: int, path: str, body: dict | None = None):
    """Send GET, or POST if there is a body, and return the decoded JSON."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        error.close()  # the error holds the connection
        raise


class Session:
    """A WebSocket to one environment: sends a frame and returns the `data` of the answer."""

    def __init__(self, port: int):
        self._connection = connect(
            f"ws://127.0.0.1:{port}/ws", compression=None, open_timeout=LIMIT_S
        )

    async def __aenter__(self) -> Self:
        self._socket = await self._connection.__aenter__()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._connection.__aexit__(*failure)

    async def send(self, kind: str, **data: object) -> dict:
        frame = {"type": kind} if kind == "state" else {"type": kind, "data": data}
        await self._socket.send(json.dumps(frame))
        async with asyncio.timeout(LIMIT_S):
            return json.loads(await self._socket.recv())["data"]


@dataclass(frozen=True, kw_only=True)
class Env:
    """An environment, a policy that plays it, and its differences from the others."""

    name: str
    policy: str
    num_eval_tasks: int
    reset: dict[str, Any] = field(default_factory=dict)
    bad_resets: tuple[dict[str, Any], ...] = ()
    field: str = "action"
    needs: str = ""  # a package


ENVS = [
    Env(
        name="wordle",
        policy="consistent",
        num_eval_tasks=50,
        bad_resets=({"words": ["full"]}, {"index": 200}),
        field="guess",
    ),
    Env(name="blackjack", policy="random_action", num_eval_tasks=10_000, needs="pyspiel"),
    Env(
        name="catch",
        policy="random_move",
        num_eval_tasks=1000,
        bad_resets=({"rows": 5}, {"columns": "5"}),
        needs="pyspiel",
    ),
    Env(
        name="game2048",
        policy="random_move",
        num_eval_tasks=1000,
        reset={"max_moves": 10},
        bad_resets=({"max_moves": 0}, {"reward_scale": "large"}, {"reward_scale": 10**400}),
        needs="pyspiel",
    ),
    Env(
        name="tic_tac_toe",
        policy="random_move",
        num_eval_tasks=1000,
        bad_resets=({"random_moves": 8}, {"random_moves": "2"}, {"split": "test"}),
    ),
    Env(
        name="reasoning",
        policy="number_of_question",
        num_eval_tasks=1000,
        bad_resets=({"task": "riddles"}, {"task": "n_queens"}, {"config": {"size": 1}}),
        field="answer",
        needs="reasoning_gym",
    ),
]


@pytest.fixture(scope="module", params=ENVS, ids=lambda env: env.name)
def served(request) -> Iterator[tuple[Env, int]]:
    if request.param.needs:
        pytest.importorskip(request.param.needs)
    with serve(f"{request.param.name}.server.app") as port:
        yield request.param, port


async def play(session: Session, env: Env, rng: random.Random, **reset: object) -> list[dict]:
    """Play one episode; return all answers, that of the reset first."""
    policy = getattr(importlib.import_module(f"{env.name}.policies"), env.policy)
    answers = [await session.send("reset", **env.reset, **reset)]
    assert answers[0]["reward"] is None and not answers[0]["done"]
    while not answers[-1]["done"]:
        reply = policy([answer["observation"] for answer in answers], rng)
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


async def test_hidden_cards_and_right_answers_stay_secret(served):
    env, port = served

    async with Session(port) as session:
        for index in range(30):
            episode = await play(session, env, random.Random(index), index=index)
            seen = [answer["observation"] for answer in episode]
            if env.name == "wordle":
                answer = seen[-1].pop("answer")
                for each in seen[:-1]:
                    # Green letters of several guesses may correctly spell the answer.
                    assert each.pop("pattern") == rules.pattern(each["board"])
                    assert answer not in json.dumps(each)
            if env.name == "blackjack":
                hidden = seen[-1]["dealer_cards"][0]
                assert hidden not in json.dumps(seen[:-1])
            if env.name == "reasoning":
                assert set(seen[0]) == {"task", "question", "message", "metadata"}
                assert not seen[0]["metadata"] and not seen[0]["message"]
                assert seen[-1] | {"message": ""} == seen[0]


@pytest.fixture(scope="module")
def echo_port() -> Iterator[int]:
    with serve("uvicorn", "echo.server.app:app") as port:
        yield port


async def test_echo_over_the_wire(echo_port):
    rng = random.Random(0)
    async with Session(echo_port) as session:
        early = await session.send("step", message="a")
        assert (early["reward"], early["done"]) == (0.0, True)
        for turns in (1, 4):
            reply = await session.send("reset", seed=5, turns=turns)
            assert (
                reply["observation"]
                == ((await session.send("reset", seed=5, turns=turns))["observation"])
            )
            total = 0.0
            while not reply["done"]:
                message = echo_policies.perfect([reply["observation"]], rng)
                reply = await session.send("step", message=message)
                assert reply["observation"]["echoed"] == message
                total += reply["reward"]
            assert total == pytest.approx(1.0)
            assert reply["observation"]["turn"] == turns
        assert (await session.send("step", message="a"))["reward"] == 0.0
        assert "turns" in (await session.send("reset", turns=9))["message"]


@pytest.fixture(scope="module")
def taxi_port() -> Iterator[int]:
    pytest.importorskip("gymnasium")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GYM_ID", "Taxi-v4")
        with serve("gymnasium_env.server.app") as port:
            yield port


async def test_gymnasium_over_the_wire(taxi_port):
    action = call(taxi_port, "/schema")["action"]["properties"]["action"]
    assert (action["type"], action["minimum"], action["maximum"]) == ("integer", 0, 5)
    async with Session(taxi_port) as one, Session(taxi_port) as other:
        first = await one.send("reset", seed=7)
        assert first != await other.send("reset", seed=8)
        assert first == await other.send("reset", seed=7)
        assert "- 4: Pickup passenger" in first["observation"]["rules"]
        for chosen in first["observation"]["legal_actions"]:
            answer = await one.send("step", action=chosen)
            assert answer == await other.send("step", action=str(chosen))
            assert (answer["reward"], answer["done"]) == (-1.0, False)
        for wrong in (6, "north", None, [0]):
            assert (await one.send("step", action=wrong))["code"] == "VALIDATION_ERROR"
        assert (await one.send("state"))["step_count"] == (await other.send("state"))["step_count"]
