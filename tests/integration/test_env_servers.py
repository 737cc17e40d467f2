"""The servers of envs/, each in a process of its own, driven over the WebSocket."""

import asyncio
import json
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest
from echo import policies as echo_policies
from websockets.asyncio.client import connect
from wordle import policies, rules, words

from tests.ports import lasting_port

ENVS = Path(__file__).parent.parent.parent / "envs"
LIMIT_S = 240.0  # for each wait


@contextmanager
def serve(*command: str) -> Iterator[int]:
    """Run `python -m <command> --port <free port>` in envs/ for the block, and yield the port."""
    port = lasting_port()
    process = subprocess.Popen([sys.executable, "-m", *command, "--port", str(port)], cwd=ENVS)
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


@pytest.fixture(scope="module")
def wordle_port() -> Iterator[int]:
    with serve("wordle.server.app") as port:
        yield port


@pytest.fixture(scope="module")
def echo_port() -> Iterator[int]:
    with serve("uvicorn", "echo.server.app:app") as port:
        yield port


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


async def play(session: Session, policy, rng: random.Random, **reset: object) -> list[dict]:
    """Play one episode; return all answers, that of the reset first."""
    answers = [await session.send("reset", **reset)]
    while not answers[-1]["done"]:
        guess = policy([answer["observation"] for answer in answers], rng)
        answers.append(await session.send("step", guess=guess))
    return answers


async def test_a_game_over_the_wire(wordle_port):
    answer = words.answers("train")[3]
    async with Session(wordle_port) as session:
        first = await session.send("reset", split="train", index=3, episode_id="third")
        assert first["reward"] is None and not first["done"]
        assert first["observation"]["turns_left"] == 6
        other = words.answers("train")[4]
        second = await session.send("step", guess=other)
        assert second["observation"]["board"][0]["guess"] == other
        assert (second["reward"], second["done"]) == (0.0, False)
        last = await session.send("step", guess=answer.upper())
        assert (last["reward"], last["done"]) == (1.0, True)
        assert last["observation"]["status"] == "won"
        assert last["observation"]["answer"] == answer
        assert await session.send("state") == {"episode_id": "third", "step_count": 2}


async def test_the_same_seed_gives_the_same_game(wordle_port):
    async with Session(wordle_port) as one, Session(wordle_port) as other:
        for seed in range(20):
            games = [
                await play(session, policies.consistent, random.Random(seed), seed=seed)
                for session in (one, other, one)
            ]
            assert games[0] == games[1] == games[2]


async def test_thirty_two_sessions_at_once_stay_apart(wordle_port):
    async def one_session(index: int) -> None:
        rng = random.Random(index)
        async with Session(wordle_port) as session:
            for _ in range(5):
                game = await play(session, policies.consistent, rng, split="train", index=index)
                assert game[-1]["observation"]["answer"] == words.answers("train")[index]

    await asyncio.gather(*(one_session(index) for index in range(32)))


async def test_the_answer_stays_secret_until_the_end(wordle_port):
    async with Session(wordle_port) as session:
        for index in range(words.num_tasks("train")):
            rng = random.Random(index)
            policy = policies.random_word if index % 2 else policies.consistent
            game = await play(session, policy, rng, split="train", index=index)
            answer = words.answers("train")[index]
            assert game[-1]["observation"]["answer"] == answer
            for seen in game[:-1]:
                # Green letters of several guesses may correctly spell the answer.
                board = seen["observation"]["board"]
                assert seen["observation"].pop("pattern") == rules.pattern(board)
                assert answer not in json.dumps(seen)
            assert answer not in json.dumps(await session.send("state"))


async def test_invalid_guesses_are_answered_and_cost_a_turn(wordle_port):
    async with Session(wordle_port) as session:
        await session.send("reset", seed=1)
        for turn, guess in enumerate(["", "zzzzz", "a" * 100_000, "\u0000", "12345"], start=1):
            reply = await session.send("step", guess=guess)
            assert reply["observation"]["turn"] == turn
            assert reply["observation"]["message"].startswith("Invalid guess")
            assert reply["observation"]["board"] == []
        last = await session.send("step", guess="é")
        assert (last["reward"], last["done"]) == (0.0, True)
        assert last["observation"]["status"] == "lost"


async def test_a_step_before_reset_or_after_the_end_changes_nothing(wordle_port):
    answer = words.answers("train")[0]
    async with Session(wordle_port) as session:
        early = await session.send("step", guess=answer)
        assert (early["reward"], early["done"]) == (0.0, True)
        assert "Reset" in early["observation"]["message"]
        await session.send("reset", index=0)
        won = await session.send("step", guess=answer)
        again = await session.send("step", guess=answer)
        assert (won["reward"], again["reward"], again["done"]) == (1.0, 0.0, True)
        assert again["observation"]["board"] == won["observation"]["board"]
        assert (await session.send("state"))["step_count"] == 1


async def test_bad_reset_arguments_are_rejected_and_the_session_goes_on(wordle_port):
    async with Session(wordle_port) as session:
        for reset in ({"split": "test"}, {"words": ["full"]}, {"index": 200}, {"seed": "x"}):
            error = await session.send("reset", **reset)
            assert error["code"] == "EXECUTION_ERROR"
            assert next(iter(reset)) in error["message"]
        assert not (await session.send("reset", words="full", split="eval"))["done"]


def test_the_task_routes_count_the_tasks(wordle_port, echo_port):
    train, held_out = call(wordle_port, "/wordle/splits")
    assert (train["name"], train["num_tasks"]) == ("train", words.num_tasks("train"))
    assert held_out["num_tasks_by_words"]["full"] == words.num_tasks("eval", "full")
    assert call(wordle_port, "/wordle/num_tasks", {"split": "eval"}) == {"num_tasks": 50}
    task = call(wordle_port, "/wordle/task", {"split": "eval", "index": 49})["task"]
    assert task == {"split": "eval", "index": 49}
    span = {"split": "eval", "start": 48}
    assert len(call(wordle_port, "/wordle/task_range", span)["tasks"]) == 2
    for route, body in {
        "num_tasks": {"split": "x"},
        "task": {"split": "eval", "index": 50},
    }.items():
        with pytest.raises(urllib.error.HTTPError) as caught:
            call(wordle_port, f"/wordle/{route}", body)
        assert caught.value.code == 400
    assert [split["num_tasks"] for split in call(echo_port, "/echo/splits")] == [400, 100]
    assert len(call(echo_port, "/echo/tasks", {"split": "eval"})["tasks"]) == 100


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
