"""Episodes to imitate: which are chosen, and how those of other models are written anew."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes import made_up_episode, made_up_turn, run_config, tiny_policy
from test_rerender import DROPS_THOUGHTS

from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.sft.episodes import read_recorded
from openenv_pipe.extras.sft.schema import EpisodesConfig
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import CHAT_TEMPLATE, build_tokenizer
from openenv_pipe.rollout.history import HISTORIES
from openenv_pipe.runs.episodes import episodes_path, write_episodes
from openenv_pipe.types import Group, Usage

CHAT = tiny_policy().chat
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}}}}}


ASKED = [{"role": "user", "content": "?"}]


def own_turn(reply):
    return made_up_turn(CHAT.first_ids(ASKED), CHAT.reply_ids(reply), reply=reply)


def hosted_turn(reply, messages):
    """Return a turn of a model that takes messages, without token ids."""
    usage = Usage(num_prompt_tokens=1, num_completion_tokens=1)
    return made_up_turn([], [], reply=reply, messages=messages, usage=usage)


def group(name, *episodes):
    """Return a group of episodes, each given as reward, success and turns."""
    members = [
        replace(made_up_episode(reward, member=member, turns=turns), success=success)
        for member, (reward, success, turns) in enumerate(episodes)
    ]
    return Group(id=name, task=members[0].task, episodes=members)


async def imitated(tmp_path, groups, notes=None, **changes):
    (tmp_path / "episodes").mkdir()
    for step, each in enumerate(groups, start=1):
        write_episodes(episodes_path(tmp_path, step), [each])
    values = {"type": "episodes", "path": str(tmp_path), "only": None, "best": None}
    return await read_recorded(
        EpisodesConfig(**(values | changes)),
        SimpleNamespace(
            config=run_config(),
            rollout=SimpleNamespace(chat=CHAT),
            notify=(notes if notes is not None else []).append,
        ),
    )


def replies(groups):
    return [[turn.reply for e in each.episodes for turn in e.turns] for each in groups]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [["a", "b", "c"], ["d"]]),
        ({"only": "success"}, [["a", "c"]]),
        ({"best": 1}, [["a"], ["d"]]),
        ({"best": 2, "only": "success"}, [["a", "c"]]),
    ],
)
async def test_the_best_and_the_successful_are_chosen(changes, expected, tmp_path):
    groups = [
        group(
            "step 1/0",
            *((0.2, True, [own_turn("c")]), (0.9, True, [own_turn("a")])),
            (0.5, False, [own_turn("b")]),
        ),
        group("step 2/0", (0.0, False, [own_turn("d")])),
    ]
    notes = []
    found = await imitated(tmp_path, groups, notes, **changes)
    assert replies(found) == expected
    assert notes == [f"imitating {sum(map(len, expected))} of 4 episodes"]
    assert found[0].episodes[0].turns[0].completion_ids == CHAT.reply_ids("a")


async def test_episodes_of_a_hosted_model_are_written_in_the_format_of_this_one(tmp_path):
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    opening = [{"role": "tools", "content": json.dumps([TOOL])}, *ASKED]
    result = [{"role": "tool", "name": "add", "content": "2"}]
    turns = [hosted_turn(call, opening), hosted_turn("two", result)]
    (found,) = await imitated(tmp_path, [group("step 1/0", (1.0, True, turns))])
    first, second = found.episodes[0].turns
    assert CHAT.tokenizer.decode(first.prompt_ids) == "<|system|>add(a)\n<|user|>?<|assistant|>"
    assert CHAT.reply_reader.read(first.reply).made_calls[0].name == "add"
    assert CHAT.reply_text(second.completion_ids) == "two"
    assert first.steps == turns[0].steps
    assert first.usage is None


async def test_the_examples_of_a_prompt_are_not_imitated(tmp_path):
    asked = [{"role": "user", "content": "a?"}]
    shown = [{"role": "user", "content": "b?"}, {"role": "assistant", "content": "b"}, *asked]
    turns = [hosted_turn("a", shown), hosted_turn("c", [{"role": "user", "content": "c?"}])]
    (found,) = await imitated(tmp_path, [group("step 1/0", (1.0, True, turns))])
    assert replies([found]) == [["a", "c"]]
    assert found.episodes[0].turns[0].prompt_ids == CHAT.first_ids(shown)


def ids_alone(prompt_ids, end):
    """Return a turn whose reply reads the same as this model's, as far as it can be read."""
    ids = [*CHAT.encode("a"), end]
    return made_up_turn(prompt_ids, ids, reply=CHAT.reply_text(ids))


BRANCH = "the token ids are of another model, and its turns are not one conversation"
OTHER = made_up_turn([5, 6], CHAT.reply_ids("a"), reply="a", messages=ASKED)


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        ([made_up_turn([5], [6, 7], reply="hello")], "the token ids are of another model"),
        # A program may ask twice for one reply, or something else beside its task.
        ([hosted_turn("a", ASKED), replace(hosted_turn("b", ASKED), parent=None)], BRANCH),
        ([OTHER, replace(OTHER, parent=None)], BRANCH),
        *(
            ([turn], "the token ids are of another model, and the messages are not")
            for turn in (
                ids_alone([5, 999], CHAT.ends.usual),
                ids_alone([5], CHAT.encode("!")[0]),
            )
        ),
        ([own_turn(2000 * "x")], "longer than env.max_episode_tokens="),
    ],
    ids=["ids", "branches", "branches of ids", "ids of a prompt", "another end", "too long"],
)
async def test_episodes_that_this_model_cannot_imitate_are_left_out(turns, why, tmp_path):
    own, notes = group("step 2/0", (1.0, True, [own_turn("a")])), []
    found = await imitated(tmp_path, [group("step 1/0", (1.0, True, turns)), own], notes)
    assert replies(found) == [["a"]]
    assert f"1 left out: {why}" in notes[0]


def rerendered_turns(chat, *replies):
    """Return the turns of an episode whose prompts a template renders anew, as the loop records."""
    turns, history = [], HISTORIES["rerender"](chat, ASKED, [])
    for reply in replies:
        ids = chat.reply_ids(reply)
        values = {"reply": chat.reply_text(ids), "parent": history.parent, "messages": ASKED}
        turns.append(made_up_turn(history.new_ids, ids, **values))
        history.add(turns[-1], ASKED)
    return turns


@pytest.mark.parametrize("dropped", [True, False])
async def test_rerendered_prompts_of_another_template_are_written_anew(dropped, tmp_path):
    """Whether the turns continue each other, or begin roots where a thought is dropped."""
    tokenizer = build_tokenizer()
    template = DROPS_THOUGHTS if dropped else CHAT_TEMPLATE
    tokenizer.chat_template = "<|system|>Hi" + template
    turns = rerendered_turns(ChatFormat(tokenizer, "rerender"), "xa", "xb")
    assert [turn.parent for turn in turns] == [None, None if dropped else 0]
    (found,) = await imitated(tmp_path, [group("step 1/0", (1.0, True, turns))])
    first, second = found.episodes[0].turns
    assert first.prompt_ids == CHAT.first_ids(ASKED)
    assert second.prompt_ids == CHAT.following_ids(ASKED, end=CHAT.ends.usual)
    assert replies([found]) == [["xa", "xb"]]


async def test_a_program_whose_history_was_rendered_anew_is_one_conversation(tmp_path):
    """Each of its calls has all messages, and begins a root."""
    more = [*ASKED, {"role": "assistant", "content": "shown"}, {"role": "user", "content": "!"}]
    turns = [hosted_turn("a", ASKED), replace(hosted_turn("b", more), parent=None)]
    (found,) = await imitated(tmp_path, [group("step 1/0", (1.0, True, turns))])
    assert replies([found]) == [["a", "b"]]
    assert found.episodes[0].turns[1].prompt_ids == CHAT.following_ids(
        more[2:], end=CHAT.ends.usual
    )


async def test_prompts_of_another_chat_template_are_written_anew(tmp_path):
    (found,) = await imitated(tmp_path, [group("step 1/0", (1.0, True, [OTHER]))])
    assert found.episodes[0].turns[0].prompt_ids == CHAT.first_ids(ASKED)
    assert found.episodes[0].turns[0].completion_ids == CHAT.reply_ids("a")


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"only": "success"}, "none of 1 episodes can be imitated"), ({"path": "nowhere"}, "nowhere")],
)
async def test_without_episodes_there_is_an_error_with_the_key(changes, error, tmp_path):
    groups = [group("step 1/0", (0.0, False, [own_turn("a")]))]
    with pytest.raises(ConfigError, match=error) as caught:
        await imitated(tmp_path, groups, **changes)
    assert "trainer.warm_start.source" in str(caught.value)
