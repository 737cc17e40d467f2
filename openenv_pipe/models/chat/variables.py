"""Set variables of a chat template, such as `enable_thinking`, for all prompts of a run, and make
one template of several.

They are written into the template, so that every program that renders it shows the same prompts:
also vLLM's server, and whoever uses an exported model.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.meta

from openenv_pipe.errors import ConfigError

_SET = re.compile(r"\{#- Variables of the run\. -#\}.*?\{#- End of variables\. #\}\n", re.DOTALL)
GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # tags that transformers adds
_GIVEN = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("raise_exception", "strftime_now"),
    )
)


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
                f"{key} is no variable of the chat template, which reads "
                f"{', '.join(sorted(read)) or 'none'}; remove it, or set one that it reads"
            )
    sets = "".join(f"{{%- set {name} = {_literal(value)} -%}}" for name, value in variables.items())
    # The line break at the end of a comment is left out, and what follows begins a line, as before.
    return f"{{#- Variables of the run. -#}}{sets}{{#- End of variables. #}}\n{template}"


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
    # Jinja leaves out the line break behind a tag, and the one that ends a template.
    branches = (text.removesuffix("\n") for text in (for_tools, default))
    return "{% if tools %}\n" + "{% else %}\n".join(branches) + "{% endif %}"


def _variables_of(template: str) -> set[str]:
    """Return the names that a template reads, without those that every prompt is given.

    Raises ConfigError.
    """
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(GENERATION.sub("", template))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is no Jinja template: {error}; set model.chat_template to one"
        ) from None
    return jinja2.meta.find_undeclared_variables(parsed) - _GIVEN


def _literal(value: Any) -> str:
    """Return JSON data as a Jinja literal."""
    if isinstance(value, Mapping):
        pairs = (f"{_literal(key)}: {_literal(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
        return f"'{escaped}'"
    return "none" if value is None else json.dumps(value)
