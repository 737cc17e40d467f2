"""Replies that no model has sampled, as the model writes them: of data sets and scripted policies.

The stock templates are those of `test_rerender`.
"""

import pytest
from fakes import tiny_policy
from test_rerender import TOOL, play_scripted, stock_chat, stock_tokenizer

from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import CHAT_TEMPLATE, build_tokenizer

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
THOUGHT = "<think>\nwhy\n</think>\n\n4"
NATIVE_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
)
ANALYSIS = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
# By template: the reply `4`, the same after a thought, and a call.
WRITTEN = {
    "gptoss": (
        "<|channel|>final<|message|>4<|return|>",
        f"{ANALYSIS}<|channel|>final<|message|>4<|return|>",
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
    ),
    "qwen3": (
        "<think>\n\n</think>\n\n4<|im_end|>",
        f"{THOUGHT}<|im_end|>",
        f"<think>\n\n</think>\n\n{CALL}<|im_end|>",
    ),
    "qwen3_5_think": (
        "\n</think>\n\n4<|im_end|>",
        "why\n</think>\n\n4<|im_end|>",
        f"\n</think>\n\n{CALL}<|im_end|>",
    ),
    "qwen3_8": (
        "\n</think>\n\n4<|im_end|>",
        "why\n</think>\n\n4<|im_end|>",
        f"\n</think>\n\n{NATIVE_CALL}<|im_end|>",
    ),
    "nemotron_3_nano": (
        "</think>4<|im_end|>",
        "why\n</think>\n4<|im_end|>",
        f"</think>\n{NATIVE_CALL}\n<|im_end|>",
    ),
    "llama3_2": ("4<|eot_id|>", f"{THOUGHT}<|eot_id|>", f"{CALL}<|eot_id|>"),
}
# A template that opens a thought, and shows earlier replies without one.
OPENS_THOUGHT = CHAT_TEMPLATE.replace(
    "<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}"
)


def text_of(chat, reply, tools=()):
    ids = chat.reply_ids(chat.writer.own_text(reply, tools))
    return chat.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_reply_is_written_as_the_stock_template_writes_it(name):
    texts = [text_of(stock_chat(name, "auto"), reply, [TOOL]) for reply in ("4", THOUGHT, CALL)]
    assert texts == [*WRITTEN[name]]


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("reply", ["4", THOUGHT, CALL, f"I add.\n{CALL}", f"{CALL}\n{CALL}"])
def test_a_written_reply_is_read_as_what_was_to_be_written(name, reply):
    chat = stock_chat(name, "auto")
    ids = chat.reply_ids(chat.writer.own_text(reply, [TOOL]))
    assert not chat.ends.ids.intersection(ids[:-1])
    read = chat.reply_reader.read(chat.reply_text(ids), [TOOL])
    assert [call.name for call in read.made_calls] == ["add"] * reply.count("<tool_call>")
    assert not read.is_thinking
    assert ("4" in reply) == (read.text == "4")
    assert ("why" in reply) == (read.thought == "why")
    # Its own reply, as a client may have it recorded, is written the same.
    assert chat.reply_ids(chat.writer.own_text(chat.reply_text(ids), [TOOL])) == ids


@pytest.mark.parametrize(
    "reply", ["4", " crâne\n", THOUGHT, CALL, f"I.{CALL}", "<think> a", "", "{"]
)
def test_a_plain_template_gets_replies_as_they_are(reply):
    chat = tiny_policy().chat
    assert chat.writer.own_text(reply, [TOOL]) == reply


def test_a_prompt_that_opens_a_thought_is_closed_where_the_template_writes_none():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = OPENS_THOUGHT
    chat = ChatFormat(tokenizer, "rerender")
    assert [chat.writer.own_text(reply) for reply in ("4", THOUGHT)] == [
        "\n</think>\n\n4",
        "why\n</think>\n\n4",
    ]


def test_a_thought_without_a_place_in_the_template_cannot_be_written():
    tokenizer = stock_tokenizer("qwen3")
    tokenizer.chat_template = "{% set enable_thinking = false %}" + tokenizer.chat_template
    message = {"role": "assistant", "content": "4", "reasoning_content": "why"}
    assert ChatFormat(tokenizer, "rerender").writer.of_message(message) is None


@pytest.mark.parametrize(
    ("name", "action"), [("qwen3_5_think", "\n</think>\n\n4"), ("gptoss", "4")]
)
async def test_a_scripted_reply_is_played_as_the_model_writes_it(name, action):
    chat = stock_chat(name)
    episode = await play_scripted(chat, "4", num_turns=2)
    texts = [chat.tokenizer.decode(turn.completion_ids) for turn in episode.turns]
    assert texts == [WRITTEN[name][0]] * 2
    assert [turn.steps[0].action for turn in episode.turns] == [{"text": action}] * 2
