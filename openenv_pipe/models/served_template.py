"""Chat templates for servers that keep tool calls apart from the text of messages.

In episodes, the calls of a model are in the text of its messages. vLLM, and whoever uses an
exported model, gives them to the template as `tool_calls`. A template that shows the text alone
would drop them there, and the model would not see what it has called. A template without tools
would also drop their description.
"""

from openenv_pipe.models.template_messages import TOOLS_IN_WORDS

TEMPLATE_FILE = "chat_template.jinja"  # as transformers names it
# Each changes the messages that a template gets, as `read_request` and `template_messages` do.
_BEGIN = """\
{%- set served = namespace(messages=[], words='', follows_result=false) -%}
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
{%- endfor -%}
"""
_RESULTS_AS_USER = """\
{%- set is_result = message.role == 'tool' -%}
{%- if is_result -%}
{%- set message = {'role': 'user'} -%}
{%- set shown.text = '<tool_response>\\n' + shown.text + '\\n</tool_response>' -%}
{%- if served.follows_result -%}
{%- set shown.text = served.messages[-1].content + '\\n' + shown.text -%}
{%- set served.messages = served.messages[:-1] -%}
{%- endif -%}
{%- endif -%}
{%- set served.follows_result = is_result -%}
"""
_END = """\
{%- set served.messages = served.messages + [dict(message, content=shown.text)] -%}
{%- endfor -%}
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
"""
_REPLACE = "{%- set messages = served.messages %}"  # no `-` here: the template's own begin follows


def served_template(template: str) -> str:
    """Return a template that also shows `tool_calls`, and tools, if the given one shows none.

    For messages without calls and results, and without tools, both give the same text.
    """
    if "tool_calls" in template:
        return template
    if "tools" in template:
        return _BEGIN + _END + _REPLACE + template
    words = _TOOLS_IN_WORDS.replace("WORDS", _quoted(TOOLS_IN_WORDS))
    return _BEGIN + _RESULTS_AS_USER + _END + words + _REPLACE + template


def _quoted(text: str) -> str:
    """Return a text as a Jinja string."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"
