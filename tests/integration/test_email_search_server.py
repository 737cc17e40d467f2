"""The server of email_search, with its tools called by steps and by MCP requests."""

import asyncio
import json
import random
import re
from collections.abc import Iterator

import pytest
from email_search import policies, tasks
from test_env_servers import Session, call, serve

from openenv_pipe.models.replies.reader import PLAIN_READER

EPISODE_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@pytest.fixture(scope="module")
def email_port() -> Iterator[int]:
    with serve("email_search.server.app") as port:
        yield port


async def use(session: Session, name: str, **arguments: object) -> dict:
    """Call a tool by a step."""
    return await session.send("step", type="call_tool", tool_name=name, arguments=arguments)


async def play(session: Session, policy, **reset: object) -> list[dict]:
    """Play one episode through the adapter; return all answers, that of the reset first."""
    answers, rng = [await session.send("reset", **reset)], random.Random(0)
    while not answers[-1]["done"]:
        reply = policy([answer["observation"] for answer in answers], rng)
        (made,) = PLAIN_READER.read(reply).made_calls
        answers.append(await use(session, made.name, **made.arguments))
    return answers


def gold_of(index: int) -> tuple[str, str]:
    """Return a right answer and the id of the message that it comes from."""
    question = tasks.choose_task("train", index, None).question
    text = f"{question.answer / 100:.2f}" if question.answer_kind == "amount" else question.answer
    return str(text), question.source


async def test_an_episode_over_the_wire(email_port):
    async with Session(email_port) as session:
        text, source = gold_of(3)
        first = await session.send("reset", split="train", index=3, episode_id="third")
        assert first["reward"] is None and not first["done"]
        assert (first["observation"]["calls_left"], first["observation"]["num_messages"]) == (
            10,
            320,
        )
        found = await use(session, "search", query="lunch", limit=3)
        assert len(found["observation"]["result"]["content"][0]["text"].splitlines()) == 6
        message = await use(session, "read", message_id=source)
        assert f"Id: {source}" in message["observation"]["result"]["data"]
        assert (message["reward"], message["done"]) == (0.0, False)
        last = await use(session, "answer", text=text, message_ids=[source])
        assert (last["reward"], last["done"]) == (1.0, True)
        assert last["metadata"] == {"verdict": "right", "citation": 1.0}
        assert await session.send("state") == {"episode_id": "third", "step_count": 3}
        late = await use(session, "answer", text=text, message_ids=[source])
        assert (late["reward"], late["done"]) == (0.0, True)
        assert "over" in late["observation"]["error"]["message"]


async def test_the_tools_can_be_listed_before_and_after_a_reset(email_port):
    async with Session(email_port) as session:
        for _ in range(2):
            listing = await session.send("step", type="list_tools")
            tools = {tool["name"]: tool for tool in listing["observation"]["tools"]}
            assert set(tools) == {"search", "read", "answer"}
            assert tools["search"]["input_schema"]["required"] == ["query"]
            assert (listing["reward"], listing["done"]) == (None, False)
            await session.send("reset", index=0)


async def test_a_step_before_reset_is_answered(email_port):
    async with Session(email_port) as session:
        early = await use(session, "search", query="lunch")
        assert (early["reward"], early["done"]) == (0.0, True)
        assert "Reset" in early["observation"]["error"]["message"]


async def test_bad_calls_are_errors_that_cost_a_call(email_port):
    async with Session(email_port) as session:
        await session.send("reset", index=0, max_calls=4)
        for name, arguments in (
            ("search", {}),
            ("delete", {}),
            ("read", {"message_id": 7}),
            ("search", {"query": "x", "limit": "many"}),
        ):
            reply = await use(session, name, **arguments)
            assert reply["observation"]["error"]["message"]
            assert not reply["done"]
        reply = await use(session, "search", query="lunch")
        assert (reply["reward"], reply["done"]) == (0.0, True)


async def test_calls_beside_the_steps_count_as_well(email_port):
    """MCP requests reach the same tools, count for the limit, and earn no reward for an answer."""

    def request(name: str, **arguments: object) -> dict:
        params = {"name": name, "arguments": arguments}
        return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}

    text, source = gold_of(0)
    async with Session(email_port) as session:
        await session.send("reset", index=0, max_calls=2)
        for _ in range(3):
            await session.send("mcp", **request("search", query="lunch"))
        assert (await use(session, "answer", text=text, message_ids=[source]))["reward"] == 0.0
        await session.send("reset", index=0)
        await session.send("mcp", **request("answer", text=text, message_ids=[source]))
        assert (await use(session, "search", query="lunch"))["done"]


async def test_the_same_seed_gives_the_same_episode(email_port):
    async with Session(email_port) as one, Session(email_port) as other:
        for seed in range(5):
            episodes = [
                await play(session, policies.first_hit, seed=seed) for session in (one, other, one)
            ]
            assert episodes[0] == episodes[1] == episodes[2]


async def test_sixteen_sessions_at_once_stay_apart(email_port):
    async def one_session(index: int) -> None:
        text, source = gold_of(index)
        async with Session(email_port) as session:
            await session.send("reset", index=index)
            await use(session, "search", query="lunch")
            reply = await use(session, "answer", text=text, message_ids=[source])
            assert reply["reward"] == 1.0

    await asyncio.gather(*(one_session(index) for index in range(16)))


async def test_nothing_but_messages_has_the_answer(email_port):
    """Neither the reset, the list of tools, the state, nor the result of a wrong answer holds the
    answer."""

    async with Session(email_port) as session:
        for index in range(24):
            text, source = gold_of(index)
            seen = [
                await session.send("reset", split="train", index=index),
                await session.send("step", type="list_tools"),
                await session.send("state"),
                await use(session, "answer", text="I don't know", message_ids=[]),
            ]
            # random digits of an episode's id could equal a short answer
            shown = EPISODE_ID.sub("", json.dumps(seen))
            assert text not in shown and source not in shown


def test_the_baselines_earn_what_the_readme_says(email_port):
    async def total(policy) -> float:
        async with Session(email_port) as session:
            episodes = [
                await play(session, policy, split="eval", index=index) for index in range(30)
            ]
        return sum(reply["reward"] or 0.0 for episode in episodes for reply in episode) / 30

    assert asyncio.run(total(policies.search_and_read)) > 0.7
    assert 0.2 < asyncio.run(total(policies.first_hit)) < 0.7
    assert asyncio.run(total(policies.random_message)) < 0.05


async def test_the_expert_answers_from_the_message_that_it_read_last(email_port):
    num_answered = 0
    async with Session(email_port) as session:
        for index in range(30):
            *before, _ = await play(session, policies.search_and_read, split="eval", index=index)
            seen = [answer["observation"] for answer in before]
            (made,) = PLAIN_READER.read(policies.search_and_read(seen, random.Random(0))).made_calls
            for source in made.arguments["message_ids"]:
                assert seen[-1]["result"]["data"].startswith(f"Id: {source}\n")
                num_answered += 1
    assert num_answered > 20


def test_bad_reset_arguments_are_rejected_and_the_task_routes_count(email_port):
    async def scenario():
        async with Session(email_port) as session:
            for reset in ({"split": "x"}, {"index": 960}, {"max_calls": 0}, {"seed": "x"}):
                error = await session.send("reset", **reset)
                assert error["code"] == "EXECUTION_ERROR"
                assert next(iter(reset)) in error["message"]

    asyncio.run(scenario())
    assert [split["num_tasks"] for split in call(email_port, "/email_search/splits")] == [960, 240]
    task = call(email_port, "/email_search/task", {"split": "eval", "index": 239})["task"]
    assert task == {"split": "eval", "index": 239}
