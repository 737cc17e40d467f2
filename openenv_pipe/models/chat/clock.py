"""Pin the clock of a chat template, so that all prompts of a run have the same date.

Some templates write the date by `strftime_now`. If it changed during a run, prompts of one
conversation would no longer fit each other. A pinned template is plain Jinja, so that every program
that renders it shows the pinned time: also vLLM's server, and whoever uses an exported model.
"""

import re
from datetime import datetime

CLOCK = "strftime_now"  # what transformers and vLLM give to templates
_DIRECTIVE = re.compile(r"%[-_0^#]?[A-Za-z]")
_STANDARD = [f"%{letter}" for letter in "aAwdbBmyYHIpMSfjUWcxXGuV"]  # as Python documents them
_PERCENT = "\ue000"  # in the place of %%
_PIN = re.compile(r"\{#- The clock is pinned\. -#\}.*?\{%- endmacro %\}\n", re.DOTALL)


def uses_clock(template: str) -> bool:
    """Return whether a template can read the clock: there is no other name for it."""
    return CLOCK in template


def pinned_template(template: str, moment: datetime) -> str:
    """Return a template that renders as the given one does at that moment.

    A time that was pinned before is replaced.
    """
    template = _PIN.sub("", template)
    if not uses_clock(template):
        return template
    text = f"format | replace('%%', '{_PERCENT}')"
    for directive in sorted({*_STANDARD, *_DIRECTIVE.findall(template)}):
        value = moment.strftime(directive)
        if "%" not in value:
            quoted = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
            text += f" | replace('{directive}', '{quoted}')"
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
