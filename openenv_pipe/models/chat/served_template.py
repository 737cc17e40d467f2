"""Chat templates for vLLM and whoever uses an exported model: their prompts are those of training.

These programs give the calls of messages and the tools to the template in fields of their own. In
episodes, calls are in the text of messages, and tools may be described in words. If a template
shows them differently, what training did with messages is written in Jinja and put in front of it.
"""

from collections.abc import Callable, Sequence
from functools import partial

from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.chat.messages import TOOLS_IN_WORDS
from openenv_pipe.models.chat.probes import TemplateProbe, probes, trained_ids
from openenv_pipe.models.chat.template_source import jinja_literal

TEMPLATE_FILE = "chat_template.jinja"  # as transformers names it
_NUM_SHOWN = 12  # tokens of a difference
# Each changes the messages that a template gets, as `read_request` and `messages.py` do.
_BEGIN = """\
{%- set served = namespace(messages=[], words='', follows_result=false, names={}, tools=[]) -%}
{%- for message in messages -%}
{%- set shown = namespace(text=message.content or '') -%}
{%- if shown.text is not string -%}
{%- set shown.text = shown.text | map(attribute='text') | join('\\n') -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
{%- set shown.text = shown.text + ('\\n' if shown.text else '') + '<tool_call>\\n{"name": '
    + call.function.name | tojson + ', "arguments": '
    + (arguments if arguments is string else arguments | tojson) + '}\\n</tool_call>' -%}
{%- if call.id -%}
{%- set served.names = dict(served.names, **{call.id: call.function.name}) -%}
{%- endif -%}
{%- endfor -%}
{%- set role = {'developer': 'system', 'function': 'tool'}[message.role] or message.role -%}
{%- set name = message.name or served.names[message.tool_call_id] or '' -%}
"""
_RESULTS_AS_USER = """\
{%- set is_result = role == 'tool' -%}
{%- if is_result -%}
{%- set role = 'user' -%}
{%- set shown.text = '<tool_response>\\n' + shown.text + '\\n</tool_response>' -%}
{%- if served.follows_result -%}
{%- set shown.text = served.messages[-1].content + '\\n' + shown.text -%}
{%- set served.messages = served.messages[:-1] -%}
{%- endif -%}
{%- endif -%}
{%- set served.follows_result = is_result -%}
"""
_ADD = """\
{%- set new = {'role': role, 'content': shown.text} -%}
{%- if role == 'tool' -%}{%- set new = dict(new, name=name) -%}{%- endif -%}
{%- set served.messages = served.messages + [new] -%}
{%- endfor -%}
"""
_TOOLS = """\
{%- for tool in tools or [] -%}
{%- set function = dict(tool.function.items() | rejectattr('1', 'none')) -%}
{%- set served.tools = served.tools + [dict(tool, function=function)] -%}
{%- endfor -%}
{%- set tools = served.tools or none -%}
"""
# As `described` does.
_DESCRIBED_TOOLS = """\
{%- set served = namespace(tools=[]) -%}
{%- for tool in tools or [] -%}
{%- set function = dict(tool.function.items() | rejectattr('1', 'none')) -%}
{%- set function = dict(function, description=function.description or '') -%}
{%- set served.tools = served.tools + [dict(tool, function=function)] -%}
{%- endfor -%}
{%- set tools = served.tools or none %}
"""
_TOOLS_IN_WORDS = """\
{%- if tools -%}
{%- for tool in tools -%}
{%- set served.words = served.words + tool.function | tojson + '\\n' -%}
{%- endfor -%}
{%- set first = served.messages[0] -%}
{%- set first = dict(first, content=WORDS + served.words + '\\n' + first.content) -%}
{%- set served.messages = [first] + served.messages[1:] -%}
{%- endif -%}
{%- set tools = none -%}
"""
_MERGE_RUNS = """\
{%- set runs = namespace(messages=[]) -%}
{%- for message in served.messages -%}
{%- if runs.messages and runs.messages[-1].role == message.role -%}
{%- set text = runs.messages[-1].content + '\\n\\n' + message.content -%}
{%- set runs.messages = runs.messages[:-1] + [dict(message, content=text)] -%}
{%- else -%}
{%- set runs.messages = runs.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set served.messages = runs.messages -%}
"""
# The line break at the end of a block is left out, and what follows begins a line, as before.
_REPLACE = "{%- set messages = served.messages %}\n"


def served_template(chat: ChatFormat) -> str:
    """Return a template that gives a served or exported model the prompts of training.

    Raises ConfigError: There is none; the message says how the prompts differ.
    """
    reject_other_prompts(
        chat, "the endpoint for programs", lambda probe: chat.rendered_ids(*probe.as_episode(chat))
    )
    template = chat.renderer.template
    if _first_difference(chat, template) is not None:
        if chat.has_fields:
            parts = [_DESCRIBED_TOOLS]
        else:
            parts = [_BEGIN, "" if chat.takes_tools else _RESULTS_AS_USER, _ADD, _TOOLS]
            if not chat.takes_tools:
                parts.append(_TOOLS_IN_WORDS.replace("WORDS", jinja_literal(TOOLS_IN_WORDS)))
            if not chat.renderer.takes_runs:
                parts.append(_MERGE_RUNS)
            parts.append(_REPLACE)
        template = "".join([*parts, template])
        if (difference := _first_difference(chat, template)) is not None:
            raise ConfigError(difference)
    return template


def reject_other_prompts(
    chat: ChatFormat, where: str, ids_of: Callable[[TemplateProbe], Sequence[int]]
) -> None:
    """Raise ConfigError if a program gives the model other prompts than training.

    where: what the program is called. ids_of: returns its prompts.
    """
    for probe in probes(chat):
        if difference := _difference(chat, probe, where, partial(ids_of, probe)):
            raise ConfigError(difference)


def _first_difference(chat: ChatFormat, template: str) -> str | None:
    def ids_of(given: TemplateProbe) -> list[int]:
        return chat.encode(
            chat.renderer.render(given.messages, prompt=True, tools=given.tools, template=template)
        )

    for probe in probes(chat):
        served = probe.as_served()
        for given in (served,) if chat.has_fields else (probe, served):
            ids = partial(ids_of, given)
            if difference := _difference(chat, probe, "the served template", ids):
                return difference
    return None


def _difference(
    chat: ChatFormat, probe: TemplateProbe, where: str, ids: Callable[[], Sequence[int]]
) -> str | None:
    """Say where the two prompts of a probe differ first; None: they are equal."""
    trained, served = _ids_or_error(partial(trained_ids, chat, probe)), _ids_or_error(ids)
    if trained == served or (isinstance(trained, ConfigError) and isinstance(served, ConfigError)):
        return None
    begin = f"the prompts of training and of {where} differ for a conversation with {probe.name}: "
    end = "; set model.chat_template to a template that shows both in the same way"
    if isinstance(trained, ConfigError) or isinstance(served, ConfigError):
        failed = "training" if isinstance(trained, ConfigError) else where
        error = trained if isinstance(trained, ConfigError) else served
        return f"{begin}{failed} cannot render it ({error}){end}"
    place = 0
    while trained[place : place + 1] == served[place : place + 1]:
        place += 1
    before = chat.reply_text(trained[max(0, place - _NUM_SHOWN) : place])
    one = chat.reply_text(trained[place : place + _NUM_SHOWN])
    other = chat.reply_text(served[place : place + _NUM_SHOWN])
    return f"{begin}after {before!r} come {one!r} and {other!r}{end}"


def _ids_or_error(ids: Callable[[], Sequence[int]]) -> list[int] | ConfigError:
    try:
        return list(ids())
    except ConfigError as error:
        return error
