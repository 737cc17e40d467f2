"""Change the source of a chat template: set variables, pin the clock, make one template of several.

Variables such as `enable_thinking` and the time that `strftime_now` reads are the same for all
prompts of a run: if the date changed, prompts of one conversation would no longer fit each other.
They are written into the template in plain Jinja, so that every program that renders it shows the
same prompts, such as vLLM's server, and whatever uses an exported model.
"""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.meta

from openenv_pipe.errors import ConfigError

_SET = re.compile(r"\{#- Variables of the run\. -#\}.*?\{#- End of variables\. #\}\n", re.DOTALL)
_PIN = re.compile(r"\{#- The clock is pinned\. -#\}.*?\{%- endmacro %\}\n", re.DOTALL)
GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # tags that transformers adds
_GIVEN = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("raise_exception", "strftime_now"),
    )
)
CLOCK = "strftime_now"  # what transformers and vLLM give to templates, which have no other clock
_DIRECTIVE = re.compile(r"%[-_0^#]?[A-Za-z]")
_STANDARD = [f"%{letter}" for letter in "aAwdbBmyYHIpMSfjUWcxXGuV"]  # as Python documents them
_PERCENT = "\ue000"  # in the place of %%


def template_with(template: str, variables: Mapping[str, Any]) -> str:
    """Return a template with variables set. Those that were set before are replaced.

    Raises ConfigError for a variable that the template does not read.
    """
    template = _SET.sub("", template)
    if not variables:
        return template
    read = _variables_of(template)
    for name in variables:
        key = f"model.chat_template_kwargs.{name}"
        if name in _GIVEN or name.endswith("_token"):
            raise ConfigError(f"{key} is set by the pipeline for each prompt; remove it")
        if name not in read:
            raise ConfigError(
                f"{key} is not a variable of the chat template, which reads "
                f"{', '.join(sorted(read)) or 'none'}; remove it, or set one that it reads"
            )
    sets = "".join(
        f"{{%- set {name} = {jinja_literal(value)} -%}}" for name, value in variables.items()
    )
    # The line break at the end of a comment is left out, and what follows begins a line, as before.
    return f"{{#- Variables of the run. -#}}{sets}{{#- End of variables. #}}\n{template}"


def _variables_of(template: str) -> set[str]:
    """Return the names that a template reads, without those that every prompt is given.

    Raises ConfigError.
    """
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(GENERATION.sub("", template))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is not a Jinja template: {error}; set model.chat_template to one"
        ) from None
    return jinja2.meta.find_undeclared_variables(parsed) - _GIVEN


def jinja_literal(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{jinja_literal(key)}: {jinja_literal(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(jinja_literal, value))}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
        return f"'{escaped}'"
    return "none" if value is None else json.dumps(value)


def pinned_template(template: str, moment: datetime) -> str:
    """Return a template that renders as the given one does at that moment.

    A time that was pinned before is replaced.
    """
    template = _PIN.sub("", template)
    if CLOCK not in template:
        return template
    text = f"format | replace('%%', '{_PERCENT}')"
    for directive in sorted({*_STANDARD, *_DIRECTIVE.findall(template)}):
        value = moment.strftime(directive)
        if "%" not in value:
            text += f" | replace('{directive}', {jinja_literal(value)})"
    # The line break at the end of a block is left out, and what follows begins a line, as before.
    return (
        "{#- The clock is pinned. -#}"
        f"{{%- macro {CLOCK}(format) -%}}"
        f"{{%- set text = {text} -%}}"
        "{%- if '%' in text -%}"
        f"{{{{- raise_exception('{CLOCK} has no pinned value for ' ~ format) -}}}}"
        "{%- endif -%}"
        f"{{{{- text | replace('{_PERCENT}', '%') -}}}}"
        "{%- endmacro %}\n"
    ) + template


def one_template(found: str | Mapping[str, str], folder: str) -> str:
    """Return the chat template of a tokenizer, which may have several by their names.

    transformers takes the one named `tool_use` for prompts with tools, and else `default`.
    Raises ConfigError if there is no `default`.
    """
    if isinstance(found, str):
        return found
    if "default" not in found:
        names = ", ".join(map(repr, found))
        raise ConfigError(
            f"the tokenizer of {folder!r} has the chat templates {names}, and none named "
            "'default'; set model.chat_template to a Jinja template"
        )
    default, for_tools = found["default"], found.get("tool_use")
    if for_tools is None:
        return default
    # Jinja leaves out the line break after a tag, and the one that ends a template.
    branches = (text.removesuffix("\n") for text in (for_tools, default))
    return "{% if tools %}\n" + "{% else %}\n".join(branches) + "{% endif %}"
