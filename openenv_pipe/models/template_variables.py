"""Set variables of a chat template, such as `enable_thinking`, for all prompts of a run.

They are written into the template, so that every program that renders it shows the same prompts:
also vLLM's server, and whoever uses an exported model.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from openenv_pipe.errors import ConfigError

_SET = re.compile(r"\{#- Variables of the run\. -#\}.*?\{#- End of variables\. #\}\n", re.DOTALL)
_NAME = re.compile(r"[^\W\d]\w*")
_GIVEN = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
)


def template_with(template: str, variables: Mapping[str, Any]) -> str:
    """Return a template with variables set. Those that were set before are replaced.

    Raises ConfigError for a variable that the template does not read.
    """
    template = _SET.sub("", template)
    if not variables:
        return template
    for name in variables:
        key = f"model.chat_template_kwargs.{name}"
        if name in _GIVEN or name.endswith("_token"):
            raise ConfigError(f"{key} is set by the pipeline for each prompt; remove it")
        if not _NAME.fullmatch(name) or not re.search(rf"\b{name}\b", template):
            raise ConfigError(
                f"{key} is no variable of the chat template, which does not read it; remove it, or "
                "set one that the template has, such as enable_thinking or reasoning_effort"
            )
    sets = "".join(f"{{%- set {name} = {_literal(value)} -%}}" for name, value in variables.items())
    # The line break at the end of a comment is left out, and what follows begins a line, as before.
    return f"{{#- Variables of the run. -#}}{sets}{{#- End of variables. #}}\n{template}"


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
