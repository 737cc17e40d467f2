"""Templates of served models: calls and tools are shown as they were in training."""

import json

import pytest
from test_chat_template import CHATML, QWEN3_YAML, TOOL, qwen_tokenizer

from openenv_pipe.models.chat_template import ChatFormat
from openenv_pipe.models.served_template import served_template
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.rollout.agents.chat_completions import read_request

TOKENIZERS = {
    "tiny": build_tokenizer,
    "qwen3": lambda: qwen_tokenizer(QWEN3_YAML["chat_template"]),
    "without tools": lambda: qwen_tokenizer(CHATML),
}


def called(number, **arguments):
    function = {"name": "add", "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def result(number, text):
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


CONVERSATION = [
    {"role": "user", "content": "Begin!"},
    {
        "role": "assistant",
        "content": "Both.",
        "tool_calls": [called(0, a="é"), called(1, b=2)],
    },
    result(0, "1"),
    result(1, "3"),
    {"role": "assistant", "content": "", "tool_calls": [called(2, a='"')]},
    result(2, "x"),
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "Good."},
]


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "a tool"])
@pytest.mark.parametrize("writes_json", [False, True], ids=["arguments", "arguments as JSON"])
def test_a_server_renders_what_a_program_is_trained_with(tokenizer, tools, writes_json):
    """For every length of a conversation, with arguments as vLLM gives them, and as clients do."""
    chat = ChatFormat(tokenizer)
    template = served_template(tokenizer.chat_template)
    for length in (1, 4, 6, 8):
        messages = json.loads(json.dumps(CONVERSATION[:length]))
        request = read_request({"messages": messages, "tools": tools})
        trained = chat.rendered_ids(chat.without_markup(request.messages), request.tools)
        for call in (call for each in messages for call in each.get("tool_calls", [])):
            if writes_json:
                call["function"]["arguments"] = json.dumps(
                    call["function"]["arguments"], ensure_ascii=False
                )
        text = tokenizer.apply_chat_template(
            messages,
            tools or None,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
        )
        assert text == tokenizer.decode(trained)


def test_a_message_in_parts_is_its_text(tokenizer):
    template = served_template(tokenizer.chat_template)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    whole, split = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], chat_template=template, tokenize=False
        )
        for content in ("a\nb", parts)
    )
    assert whole == split


def test_an_exported_model_is_trained_as_before(tokenizer):
    chat = ChatFormat(tokenizer)
    first, later = [{"role": "user", "content": "Go"}], [{"role": "tool", "content": "3"}]
    before = chat.first_ids(first, [TOOL]), chat.following_ids(later, ended=True)
    tokenizer.chat_template = served_template(tokenizer.chat_template)
    chat = ChatFormat(tokenizer)
    assert (chat.first_ids(first, [TOOL]), chat.following_ids(later, ended=True)) == before


def test_a_template_that_shows_calls_stays_as_it_is():
    template = "{% for message in messages %}{{ message.tool_calls }}{% endfor %}"
    assert served_template(template) == template
    assert served_template(served_template(CHATML)) == served_template(CHATML)
