"""Images in conversations: models that see them get them, and others their notes."""

import base64
from dataclasses import replace

import pytest
from fakes import TEMPLATES, FakeHost, all_episodes, collect, run_config
from test_openai_engine import CALL, Endpoint, after, request, run, said
from test_rollout import ChatOnly, MessageEngine, NoChat, scripted

from openenv_pipe.config.schema import OpenAIEngineConfig
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.environments.images import with_references
from openenv_pipe.extras.judges.trajectories import conversation_of
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.runs.episodes import read_episodes, write_episodes

NOTES = [f"[image {number}: 40 x 32 pixels]" for number in (1, 2)]
LONG = 1000  # characters


class SeeingEngine(MessageEngine):
    capabilities = replace(OpenAIEngineConfig.capabilities, sees_images=True)


def rows(number: int) -> list:
    return [[[number, column, row] for column in range(40)] for row in range(32)]


@pytest.fixture
async def images():
    found = await with_references({"a": rows(1), "b": rows(2)})
    return [found["a"], found["b"]]


async def played(engine, policy, images, first, **changes):
    """Play one episode of two turns, whose observations have `screen` and, at first, `text`."""

    def play(seed, number, action):
        return StepResult({"screen": images[min(number, 1)], "text": first}, 0.5, number == 2)

    adapter = {
        "type": "text",
        **TEMPLATES,
        "first": "{{ text }}{{ screen }}",
        "following": "{{ screen }}",
        "unusable": "? {{ why }}",
        "pattern": r"(?s)^(?P<text>.*)$",
    }
    config = run_config({"env.adapter": adapter, "env.max_episode_tokens": 500, **changes})
    options = {"host": FakeHost(play), "config": config, "num_tasks": 1, "group_size": 1}
    groups = await collect(policy, engine=engine, **options)
    return groups, all_episodes(groups)[0]


async def test_an_engine_that_sees_images_gets_them(images, tmp_path):
    engine = SeeingEngine((None, None))
    groups, episode = await played(engine, NoChat(), images, "look: ")
    sent = [each.messages for each in engine.requests]
    assert sent[0] == [
        {"role": "user", "content": f"look: {NOTES[0]}", "images": {NOTES[0]: images[0]}}
    ]
    assert sent[1][2]["images"] == {NOTES[0]: images[1]}
    assert 1280 / 784 < episode.turns[1].num_prompt_tokens < 1280 / 784 + 30
    (tmp_path / "episodes").mkdir()
    write_episodes(tmp_path / "episodes" / "step.gz", groups)
    (read,) = all_episodes(read_episodes(tmp_path / "episodes" / "step.gz"))
    assert read.turns == episode.turns
    assert "images" not in str(conversation_of(episode)[:-1])  # a judge reads text


async def test_a_image_whose_note_was_cut_is_not_sent(images):
    engine = SeeingEngine((None, None))
    changes = {"env.max_observation_tokens": 2, "env.max_turns": 1}
    await played(engine, NoChat(), images, "x" * LONG, **changes)
    (message,) = engine.requests[0].messages
    assert message.keys() == {"role", "content"}


@pytest.mark.parametrize("engine", [MessageEngine((None, None)), scripted("up")])
async def test_other_engines_get_the_notes(engine, images):
    is_scripted = engine.capabilities.takes == "observations"
    _, episode = await played(engine, ChatOnly() if is_scripted else NoChat(), images, "")
    if not is_scripted:
        sent = [each.messages[-1:] for each in engine.requests]
        assert sent == [[{"role": "user", "content": NOTES[0]}]] * 2
    assert episode.first_observation["screen"].png == images[0].png


def part(image) -> dict:
    url = f"data:image/png;base64,{base64.b64encode(image.png).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def test_endpoints_get_each_image_behind_its_note(images):
    endpoint = Endpoint(said("up"))
    content = f"{NOTES[1]} and {NOTES[0]}: \ud800"
    message = {
        "role": "user",
        "content": content,
        "images": dict(zip(NOTES, images, strict=True)),
    }

    async def story(engine):
        assert engine.capabilities.sees_images
        await engine.generate(request(message))

    run(endpoint, story, images=True)
    (sent,) = endpoint.bodies[0]["messages"]
    assert sent == {
        "role": "user",
        "content": [
            *(text(NOTES[1]), part(images[1]), text(f" and {NOTES[0]}"), part(images[0])),
            text(": ?"),
        ],
    }


def test_images_of_a_tools_answer_follow_in_a_message_of_the_user(images):
    endpoint = Endpoint(said(None, "tool_calls", tool_calls=[CALL]), said("blue"))
    result = {"role": "tool", "name": "look", "content": f"seen: {NOTES[0]}"}
    result["images"] = {NOTES[0]: images[0]}

    async def story(engine):
        first = await engine.generate(request({"role": "user", "content": "look"}))
        await engine.generate(after(first, result))

    run(endpoint, story, images=True)
    *_, answer, shown = endpoint.bodies[1]["messages"]
    assert answer == {"role": "tool", "tool_call_id": "c1", "content": f"seen: {NOTES[0]}"}
    assert shown == {"role": "user", "content": [text(NOTES[0]), part(images[0])]}


def test_images_are_sent_only_if_the_configuration_says_so(images):
    async def story(engine):
        assert not engine.capabilities.sees_images

    run(Endpoint(said("up")), story)


def test_a_chat_format_reads_the_notes(images):
    chat = ChatFormat(build_tokenizer())
    message = {"role": "user", "content": NOTES[0]}
    seen = {**message, "images": {NOTES[0]: images[0]}}
    assert chat.first_ids([seen]) == chat.first_ids([message])
    assert chat.following_ids([seen], end=chat.ends.usual) == chat.following_ids(
        [message], end=chat.ends.usual
    )
