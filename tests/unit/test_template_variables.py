"""Variables of chat templates that a configuration sets: `model.chat_template_kwargs`."""

import pytest
from fakes import run_config

from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat.template_source import one_template, template_with
from openenv_pipe.models.load import load_chat, load_tokenizer
from openenv_pipe.models.tiny import CHAT_TEMPLATE

TEMPLATE = (
    "{%- macro mode() -%}"
    "{{ '' if enable_thinking is defined and not enable_thinking else 'think' }}"
    "{%- endmacro -%}"
    + CHAT_TEMPLATE
    + "{%- if add_generation_prompt -%}{{ mode() }} {{ effort | default('high') }}"
    "{%- for each in more | default([]) -%}{{ each | tojson }}{%- endfor -%}{%- endif -%}"
)
USER = {"role": "user", "content": "a"}


def model(**variables):
    changes = {"model.chat_template": TEMPLATE, "model.chat_template_kwargs": variables}
    return run_config({"model.history": "rerender", **changes}).model


def end_of_prompt(template):
    tokenizer = load_tokenizer(model())
    tokenizer.chat_template = template
    text = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    return text.rpartition("<|assistant|>")[2]


def test_a_template_reads_the_variables_of_the_configuration():
    assert end_of_prompt(load_tokenizer(model()).chat_template) == "think high"
    config = model(enable_thinking=False, effort="it's \\ low\n")
    chat = load_chat(config)
    assert end_of_prompt(chat.renderer.template) == " it's \\ low\n"
    assert chat.tokenizer.decode(chat.rendered_ids([USER])).endswith(" it's \\ low\n")


def test_every_kind_of_json_is_a_value():
    value = [None, True, 1, -0.5, "\u00e9'", {"a": [{}]}]
    template = template_with(TEMPLATE, {"more": value})
    assert end_of_prompt(template) == 'think highnulltrue1-0.5"\u00e9\u0027"{"a": [{}]}'


def test_variables_of_an_exported_model_are_replaced():
    first = template_with(TEMPLATE, {"effort": "low"})
    assert template_with(first, {"effort": "none"}) == template_with(TEMPLATE, {"effort": "none"})
    assert template_with(first, {}) == TEMPLATE


@pytest.mark.parametrize(
    "name",
    [
        "enable_thinkin",
        "messages",
        "bos_token",
        "not a name",
        "content",
        "mode",
        "user",
        "not",
        "in",
    ],
)
def test_a_name_that_no_template_reads_is_rejected(name):
    with pytest.raises(ConfigError, match=rf"model\.chat_template_kwargs\.{name}"):
        template_with(TEMPLATE, {name: True})


def test_a_template_that_is_none_is_named():
    with pytest.raises(ConfigError, match="the chat template is not a Jinja template"):
        template_with("{% if %}", {"effort": "low"})


TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("break_at_start", ["", "\n", "\n\n"])
@pytest.mark.parametrize("break_at_end", ["", "\n", "\n\n"])
def test_one_template_of_several_shows_what_transformers_shows(tools, break_at_start, break_at_end):
    body = f"{break_at_start}{{% set a = 1 %}}{{{{ a }}}} {{{{ messages[0].content }}}}"
    templates = {
        "default": f"{body} plain{break_at_end}",
        "tool_use": f"{body} {{{{ tools | tojson }}}}{break_at_end}",
    }
    tokenizer = load_tokenizer(model())
    shown = []
    for template in (templates, one_template(templates, "a/folder")):
        tokenizer.chat_template = template
        shown.append(tokenizer.apply_chat_template([USER], tools=tools, tokenize=False))
    assert shown[0] == shown[1]


def test_several_templates_without_a_default_are_rejected_with_their_names():
    with pytest.raises(ConfigError, match=r"'a/folder' has the chat templates 'rag', and none"):
        one_template({"rag": "x"}, "a/folder")
