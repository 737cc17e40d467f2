"""`model.history=rerender`: prompts that the template renders anew. Trap numbers: tests/README.md.

The stock templates are read from the installed package trl (Apache-2.0), which stores those of the
models for comparison; the tokenizers are small ones with the templates' special tokens.
"""

import importlib.util
import pickle
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fakes import (
    DROPS_THOUGHTS,
    ChatOnly,
    FakeHost,
    RecordingEngine,
    all_episodes,
    collect,
    local_engine,
    run_config,
    tiny_policy,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.algorithms.prefix_tree import common_prefix
from openenv_pipe.algorithms.samples import episode_samples
from openenv_pipe.engines.scripted import ScriptedEngine
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.chat.served_template import served_template
from openenv_pipe.models.tiny import CHAT_TEMPLATE, build_tokenizer
from openenv_pipe.types import Status

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "A sum.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
# By template: the end of a text, the end of the model's turn, and a reply with a thought.
STOCK = {
    "qwen3": ("<|im_end|>", "<|im_end|>", "<think>\nwhy\n</think>\n\nok"),
    "qwen3_instruct_2507": ("<|im_end|>", "<|im_end|>", "ok"),
    "qwen2_5": ("<|endoftext|>", "<|im_end|>", "ok"),
    "llama3": ("<|eot_id|>", "<|eot_id|>", "ok"),
    "llama3_1": ("<|eot_id|>", "<|eot_id|>", "ok"),
    "llama3_2": ("<|eot_id|>", "<|eot_id|>", "ok"),
    "gemma3": ("<eos>", "<end_of_turn>", "ok"),
    "gemma4_v5": ("<turn|>", "<turn|>", "<|channel>thought\nwhy\n<channel|>ok"),
    "nemotron_3_nano": ("<|im_end|>", "<|im_end|>", "why\n</think>\nok"),
    "qwen3_5_think": ("<|im_end|>", "<|im_end|>", "why\n</think>\n\nok"),
    "deepseekv3": ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "why\n</think>ok"),
    "phi3": ("<|endoftext|>", "<|end|>", "ok"),
    "qwen3_8": ("<|im_end|>", "<|im_end|>", "why\n</think>\n\nok"),
    "lfm2": ("<|im_end|>", "<|im_end|>", "ok"),
    "lfm2_2_5": ("<|im_end|>", "<|im_end|>", "<think>why</think>ok"),
    "gptoss": (
        "<|return|>",
        "<|return|>",
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>ok",
    ),
}


# What the templates write for a call, where it is not in the form of Hermes.
NATIVE_CALLS = {
    "gptoss": ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
    "gemma4_v5": "<|tool_call>call:add{a:1}<tool_call|>",
    **dict.fromkeys(
        ("nemotron_3_nano", "qwen3_8"),
        "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>",
    ),
}
WITHOUT_TOOLS = ("llama3", "gemma3", "deepseekv3", "phi3")
IN_FIELDS = ("gptoss", "gemma4_v5", "nemotron_3_nano", "qwen3_8")


def template_of(name):
    found = importlib.util.find_spec("trl")
    if found is None:
        pytest.skip("not installed: trl")
    return (Path(found.submodule_search_locations[0]) / f"chat_templates/{name}.jinja").read_text()


def stock_tokenizer(name):
    """Return a tokenizer of bytes and of the special tokens that the template names."""
    template = template_of(name)
    end, turn_end, reply = STOCK[name]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: n for n, each in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = re.findall(
        r"<[|｜][\w▁]+[|｜]?>|<\w+\|>|<(?:start|end)_of_turn>", template + turn_end + reply
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        bos_token="<bos>",
        additional_special_tokens=[*dict.fromkeys(names)],
        chat_template=template,
    )
    wrapped.add_tokens(["<think>", "</think>"])
    return wrapped


@cache
def stock_chat(name, history="rerender"):
    """Return the chat format of a stock template, which tests share and do not change."""
    return ChatFormat(stock_tokenizer(name), history)


def user(text):
    return {"role": "user", "content": text}


def counting_host():
    return FakeHost(lambda seed, number, action: StepResult({"text": f"n{number}"}, 0.5, False))


async def play_scripted(chat, reply, *, num_turns=3):
    """Return an episode of a player that always gives the same reply."""
    config = run_config(
        {
            "env.max_turns": num_turns,
            "env.max_reply_tokens": 200,
            "env.max_episode_tokens": 4000,
            "model.max_length": 4000,
            "env.adapter.system": "Be brief.",
        }
    )
    engine = ScriptedEngine(lambda observations, draw: reply)
    options = {"host": counting_host(), "config": config, "num_tasks": 1, "group_size": 1}
    (episode,) = all_episodes(await collect(ChatOnly(chat), engine=engine, **options))
    assert len(episode.turns) == num_turns
    return episode


def contexts_of(episode):
    """Return the whole prompt of each turn, from the graph."""
    found, parents = [], episode.parents
    for index, turn in enumerate(episode.turns):
        parent = parents[index]
        before = found[parent] + episode.turns[parent].completion_ids if parent is not None else []
        found.append(before + turn.prompt_ids)
    return found


# --- stock templates ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", STOCK)
async def test_prompts_are_the_stock_templates_own(name):
    """Trap 3: each prompt is the template applied to all messages, thoughts as it takes them."""
    chat, (_, turn_end, reply) = stock_chat(name), STOCK[name]
    tokenizer = chat.tokenizer
    assert tokenizer.convert_ids_to_tokens(chat.ends.usual) == turn_end
    episode = await play_scripted(chat, reply)
    messages = [{"role": "system", "content": "Be brief."}, user("n0")]
    for number, prompt in enumerate(contexts_of(episode), start=1):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert prompt == tokenizer.encode(text, add_special_tokens=False)
        fields = {"content": "ok", "reasoning_content": "why"} if name in IN_FIELDS else {}
        message = {"role": "assistant", "content": reply, **fields}
        messages += [message, user(f"n{number}")]
    assert [chat.reply_text(turn.completion_ids) for turn in episode.turns] == [reply] * 3


@pytest.mark.parametrize("name", STOCK)
async def test_what_a_stock_template_keeps_stays_one_sample(name):
    episode = await play_scripted(stock_chat(name), STOCK[name][2])
    samples = episode_samples("g", episode, [1.0] * 3)
    drops_thoughts = "why" in STOCK[name][2] and name != "qwen3_8"
    assert len(samples) == (3 if drops_thoughts else 1)
    trained = sum(sum(sample.loss_mask) for sample in samples)
    assert trained == episode.num_completion_tokens


@pytest.mark.parametrize("name", STOCK)
def test_stock_templates_describe_tools(name):
    """By themselves, or in words where they have no tools."""
    chat = stock_chat(name)
    assert chat.takes_tools == (name not in WITHOUT_TOOLS)
    assert chat.has_fields == (name in IN_FIELDS)
    reply = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    call = chat.reply_message(reply, [TOOL], is_sampled=False)
    result = {"role": "tool", "name": "add", "content": "it is two"}
    text = chat.tokenizer.decode(chat.rendered_ids([user("sum?"), call, result], [TOOL]))
    shown = text.rindex(NATIVE_CALLS.get(name, "<tool_call>{"))
    assert text.index("A sum.") < shown < text.index("it is two")


@pytest.mark.parametrize("name", [each for each in STOCK if each not in WITHOUT_TOOLS])
def test_prompts_with_calls_are_those_of_transformers_at_every_turn(name):
    """Replies are those that the template shows for calls and thoughts in fields of their own."""
    chat = stock_chat(name)
    tokenizer = chat.tokenizer
    theirs, ours = [user("sum?")], [user("sum?")]
    call = {"id": "call00000", "type": "function", "function": {"name": "add"}}
    call["function"]["arguments"] = {"a": 1}
    thought = {} if name == "llama3_1" or "qwen2" in name else {"reasoning_content": "why"}
    if name in ("gptoss", "lfm2_2_5"):
        thought = {"thinking": "why"}
    turns = [
        ({"content": "", "tool_calls": [call], **thought}, "tool"),
        ({"content": "", "tool_calls": [{**call, "id": "call00001"}], **thought}, "tool"),
        ({"content": "It is two.", **thought}, "user"),
    ]
    for number, (fields, role) in enumerate(turns):
        message = {"role": "assistant", **fields}
        begun, whole = (
            tokenizer.apply_chat_template(
                messages, [TOOL], tokenize=False, add_generation_prompt=is_prompt
            )
            for messages, is_prompt in ((theirs, True), ([*theirs, message], False))
        )
        if name == "gptoss" and role == "user":  # It drops earlier thoughts from this prompt.
            reply = STOCK["gptoss"][2].removesuffix("ok") + "It is two."
        else:
            assert whole.startswith(begun)
            reply = whole.removeprefix(begun).rstrip("\n").removesuffix(chat.ends.text)
            reply = reply.removesuffix("<|tool_response>")  # ends Gemma's turn before results
        ours.append(chat.reply_message(reply, [TOOL]))
        theirs.append(message)
        answer = {"role": role, "content": "two"}
        ours.append({**answer, "name": "add"} if role == "tool" else answer)
        theirs.append({**answer, "tool_call_id": f"call{number:05}"} if role == "tool" else answer)
        replies = {index: None for index, each in enumerate(ours) if each["role"] == "assistant"}
        assert tokenizer.decode(chat.rendered_ids(ours, [TOOL], replies)) == (
            tokenizer.apply_chat_template(
                theirs, [TOOL], tokenize=False, add_generation_prompt=True
            )
        )


@pytest.mark.parametrize("name", STOCK)
def test_stock_templates_can_be_served_with_the_prompts_of_training(name):
    chat = stock_chat(name)
    template = served_template(chat)
    assert template.endswith(chat.renderer.template)
    if name in IN_FIELDS:
        assert "<tool_call>" not in template.removesuffix(chat.renderer.template)


def test_results_without_a_call_are_messages_of_the_user_where_a_template_rejects_them():
    chat = stock_chat("gptoss")
    messages = [user("a"), {"role": "assistant", "content": "b"}]
    result = {"role": "tool", "name": "add", "content": "two"}
    text = chat.tokenizer.decode(chat.rendered_ids([*messages, result], [TOOL]))
    assert "<|start|>user<|message|><tool_response>\ntwo" in text


def test_the_rejection_of_a_rewriting_template_names_the_way_out():
    with pytest.raises(ConfigError, match=r"model\.history=rerender"):
        ChatFormat(stock_tokenizer("qwen3"))


@pytest.mark.parametrize("name", STOCK)
def test_the_history_auto_rejects_no_template_and_rewrites_only_where_it_has_to(name):
    tokenizer = stock_tokenizer(name)
    try:
        expected = ChatFormat(tokenizer, "append").history
    except ConfigError:
        expected = "rerender"
    chat = ChatFormat(tokenizer, "auto")
    assert chat.history == expected
    assert pickle.loads(pickle.dumps(chat)).history == expected


def test_users_who_say_two_things_are_merged_where_a_template_rejects_runs():
    tokenizer = stock_tokenizer("gemma3")
    chat = ChatFormat(tokenizer)
    text = tokenizer.decode(chat.following_ids([user("one"), user("two")], end=chat.ends.usual))
    assert "one\n\ntwo" in text


@pytest.mark.parametrize(
    ("reply", "content", "thinking"),
    [
        (STOCK["gptoss"][2], "ok", "why"),
        ("<|channel|>analysis<|message|>why and", "", "why and"),
        ("plain<|end|>", "plain", ""),
        ("<|channel|>commentary to=functions.f <|message|>{}<|call|>", "", ""),
        (
            "<|channel|>analysis<|message|>a<|channel|>final<|message|>b",
            "",
            "a< |channel|>final< |message|>b",
        ),
        ("<|channel|>", "< |channel|>", ""),
    ],
)
def test_replies_with_channels_are_taken_apart(reply, content, thinking):
    """Whatever a model writes, the template does not reject it."""
    chat = stock_chat("gptoss")
    message = chat.reply_message(reply)
    assert (message["content"], message["thinking"]) == (content, thinking)
    assert chat.rendered_ids([user("a"), message, user("b")])


# --- episodes -----------------------------------------------------------------------------------


def rerendering(policy, template):
    """Return the policy with another template."""
    policy.tokenizer.chat_template = template
    policy.chat = ChatFormat(policy.tokenizer, "rerender")
    return policy


async def test_a_template_that_keeps_everything_gives_the_samples_of_append():
    engine = ScriptedEngine(lambda observations, draw: "abc")
    found = []
    for history in ("append", "rerender"):
        chat = ChatFormat(build_tokenizer(), history)
        (episode, *_) = all_episodes(await collect(ChatOnly(chat), engine=engine))
        (sample,) = episode_samples("g", episode, [1.0] * len(episode.turns))
        found.append((sample.token_ids, sample.loss_mask, episode.status, episode.parents))
    assert found[0] == found[1]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, DROPS_THOUGHTS], ids=["keeps", "drops"])
async def test_sampler_and_trainer_agree_on_prompts_that_do_not_continue(template):
    """Trap 4: the engine keeps the keys and values of the beginning that prompts share."""
    policy = rerendering(tiny_policy(ends=True), template)
    engine = RecordingEngine(local_engine(policy))
    groups = await collect(policy, engine=engine)
    samples = []
    for episode in all_episodes(groups):
        advantages = [1.0] * len(episode.turns)
        samples += episode_samples(f"{episode.task.id}", episode, advantages)
    assert len(samples) > len(all_episodes(groups))
    batch = pack(samples, share=True)
    with torch.no_grad():
        trained, _ = policy.logprobs(batch, 1.0)
    assert (trained - batch.logprobs).abs().max() < 1e-5
    for calls in engine.calls.values():
        for (before, _), (request, _) in pairwise(calls):
            num_same = common_prefix(before.prompt_ids, request.prompt_ids)
            assert num_same > 0, "every prompt begins as the one before it"


async def test_requests_and_turns_have_the_same_prompts():
    policy = rerendering(tiny_policy(ends=True), DROPS_THOUGHTS)
    engine = RecordingEngine(local_engine(policy))
    groups = await collect(policy, engine=engine)
    for number, episode in enumerate(all_episodes(groups)):
        assert [each.prompt_ids for each, _ in engine.calls[number]] == contexts_of(episode)


async def test_the_token_limit_is_that_of_a_branch():
    policy = rerendering(tiny_policy(ends=True), DROPS_THOUGHTS)
    config = run_config({"env.max_episode_tokens": 24})
    episodes = all_episodes(await collect(policy, config=config))
    for episode in episodes:
        assert episode.num_branch_tokens <= 24
    assert max(episode.num_tokens for episode in episodes) > 24
    assert Status.TOKEN_LIMIT in {episode.status for episode in episodes}
