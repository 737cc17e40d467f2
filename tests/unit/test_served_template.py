"""Templates of served and exported models: their prompts are those of training."""

import pytest
from test_chat_template import (
    CHATML,
    MOVES_TOOLS,
    NO_TOOL_ROLE,
    QWEN3_YAML,
    TOOL,
    qwen_tokenizer,
    user,
)
from test_rerender import stock_tokenizer

from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.agents.http.chat_completions import read_request
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.chat.probes import probes, trained_ids
from openenv_pipe.models.chat.served_template import reject_other_prompts, served_template
from openenv_pipe.models.tiny import CHAT_TEMPLATE, build_tokenizer

# It shows calls in a form of its own, which training never has.
OWN_CALLS = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{{ 'CALLS ' + message.tool_calls | tojson if message.tool_calls else message.content }}",
)
SHOWS_CALLS = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ '\n' if message.content or not loop.first }}<tool_call>\n"
    "{{ '{\"name\": ' ~ call.function.name | tojson ~ ', \"arguments\": ' }}"
    "{% set arguments = call.function.arguments %}"
    "{{ arguments if arguments is string else arguments | tojson }}}\n</tool_call>{% endfor %}",
)
ALTERNATES = CHATML.replace(
    "{%- for message in messages -%}",
    "{%- for message in messages -%}"
    "{%- if not loop.first and loop.previtem.role == message.role -%}"
    "{{- raise_exception('roles must alternate') -}}{%- endif -%}",
)
CHECKS_CALLS = (
    "{%- for message in messages -%}{%- if message.tool_calls and message.role != 'assistant' -%}"
    "{{- raise_exception('tool_calls are of the assistant') -}}{%- endif -%}{%- endfor -%}"
)


def tiny(template):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


TOKENIZERS = {
    "tiny": build_tokenizer,
    "qwen3": lambda: qwen_tokenizer(QWEN3_YAML["chat_template"]),
    "without tools": lambda: qwen_tokenizer(CHATML),
    "names calls in a comment": lambda: qwen_tokenizer("{#- no tool_calls -#}" + CHATML),
    "names tools in a comment": lambda: qwen_tokenizer("{#- no tools -#}" + CHATML),
    "names calls in a check": lambda: qwen_tokenizer(CHECKS_CALLS + CHATML),
    "moves tools": lambda: qwen_tokenizer(MOVES_TOOLS),
    "rejects results": lambda: qwen_tokenizer(NO_TOOL_ROLE),
    "rejects runs": lambda: qwen_tokenizer(ALTERNATES),
    "own calls": lambda: tiny(OWN_CALLS),
    "begins with lines": lambda: tiny("\n\n  {% if true %}a{% endif %}\n" + CHAT_TEMPLATE),
    "qwen2.5 stock": lambda: stock_tokenizer("qwen2_5"),
    "llama3.1 stock": lambda: stock_tokenizer("llama3_1"),
    "gemma3 stock": lambda: stock_tokenizer("gemma3"),
}
REWRITING = {
    "qwen3 stock": lambda: stock_tokenizer("qwen3"),
    "gpt-oss stock": lambda: stock_tokenizer("gptoss"),
    "gemma4 stock": lambda: stock_tokenizer("gemma4_v5"),
    "nemotron3 stock": lambda: stock_tokenizer("nemotron_3_nano"),
}


def chats():
    for history in ("append", "rerender"):
        for name, build in {**TOKENIZERS, **REWRITING}.items():
            if history == "rerender" or name not in REWRITING:
                yield pytest.param(build, history, id=f"{name}-{history}")


@pytest.mark.parametrize(("build", "history"), list(chats()))
def test_served_prompts_are_those_of_training(build, history):
    """With arguments as vLLM gives them to templates, and as clients send them.

    Templates that show calls in a field of their own take them only as objects.
    """
    tokenizer = build()
    chat = ChatFormat(tokenizer, history)
    template = served_template(chat)
    for probe in probes(chat):
        trained = trained_ids(chat, probe)
        for each in (probe.as_served(), *([] if chat.has_fields else [probe])):
            text = tokenizer.apply_chat_template(
                list(each.messages),
                list(each.tools) or None,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
            )
            assert tokenizer.encode(text, add_special_tokens=False) == trained, probe.name


@pytest.mark.parametrize(("build", "history"), list(chats()))
def test_an_exported_model_is_trained_as_before(build, history):
    """It keeps its template, too, if it is exported again."""
    tokenizer = build()
    chat = ChatFormat(tokenizer, history)
    before = [trained_ids(chat, probe) for probe in probes(chat)]
    tokenizer.chat_template = served_template(chat)
    exported = ChatFormat(tokenizer, history)
    assert [trained_ids(exported, probe) for probe in probes(exported)] == before
    assert served_template(exported) == tokenizer.chat_template


def test_a_template_that_shows_calls_as_in_training_stays_as_it_is():
    chat = ChatFormat(tiny(SHOWS_CALLS))
    assert served_template(chat) == chat.renderer.template


def test_a_message_in_parts_is_its_text():
    tokenizer = qwen_tokenizer(CHATML)
    template = served_template(ChatFormat(tokenizer))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    whole, split = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], chat_template=template, tokenize=False
        )
        for content in ("a\nb", parts)
    )
    assert whole == split


def test_a_difference_is_named_in_words():
    chat = ChatFormat(build_tokenizer())
    with pytest.raises(ConfigError) as caught:
        reject_other_prompts(
            chat,
            "some server",
            lambda probe: chat.rendered_ids([user("query")], probe.tools),
        )
    message = str(caught.value)
    assert "training and of some server differ for a conversation with one question" in message
    assert "after '<|user|>que' come 'stion<|assistant|>' and 'ry<|assistant|>'" in message


def test_a_program_that_cannot_render_a_conversation_is_named():
    chat = ChatFormat(build_tokenizer())

    def ids_of(probe):
        raise ConfigError("no such role")

    with pytest.raises(ConfigError, match=r"some server cannot render it \(no such role\)"):
        reject_other_prompts(chat, "some server", ids_of)


def test_arguments_keep_their_order():
    function = {"name": "add", "arguments": '{"b": 1, "a": 2}'}
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}
    chat = ChatFormat(build_tokenizer())
    (read,) = chat.without_markup(read_request({"messages": [message], "tools": [TOOL]}).messages)
    assert '{"name": "add", "arguments": {"b": 1, "a": 2}}' in read["content"]
