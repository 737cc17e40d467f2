"""Untrusted text, made fit for where it is shown: a terminal, a log or Markdown.

Servers, models, files and libraries decide what error texts, names and observations say. The
functions here hide secrets, write out characters that would control a terminal or reorder a line,
and cut what is too long.
"""

import json
import re
from pathlib import Path

from openenv_pipe.system.secrets import redact

MAX_LENGTH = 2000  # characters of one untrusted text, where people read it
MAX_QUOTE_LENGTH = 80  # characters of an answer in an error message
# C0 and C1 except tab and line feed, invisible and bidirectional formatting, and lone surrogates.
INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    r"\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff"
    r"\ud800-\udfff\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
# What has a meaning in Markdown; the last alternative only at the beginning of a line.
MARKDOWN = re.compile(
    r"[\\`*~$]|\](?=[(\[:])|(?<!\w)_|_(?!\w)|<|&(?=#?\w+;)"
    r"|^(?:>|[+-](?=\s|-|$)|=(?==*$)|#(?=#*(?:\s|$))|\d+(?=[.)](?:\s|$)))"
)
ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def visible(text: str) -> str:
    r"""Write out characters that act or hide instead of being seen, as JSON does: `\u001b`."""
    return INVISIBLE.sub(lambda match: json.dumps(match[0])[1:-1], text.replace("\r\n", "\n"))


def shortened(text: str, max_length: int = MAX_LENGTH, whole: Path | None = None) -> str:
    """Cut a text after `max_length` characters, and say how many follow and which file has all."""
    num_more = len(text) - max_length
    if num_more <= 0:
        return text
    where = f"; whole text in {whole}" if whole else ""
    return f"{text[:max_length]}... ({num_more:,} more characters{where})"


def for_people(text: str, whole: Path | None = None) -> str:
    """Return a text of any origin as a terminal and a log can show it."""
    return visible(shortened(redact(text), whole=whole))


def quoted(text: str | bytes, max_length: int = MAX_QUOTE_LENGTH) -> str:
    """Quote the beginning of an answer in an error message."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    text = redact(text.strip())  # before the cut, which could leave half of a secret
    return repr(text[:max_length]) + ("..." if len(text) > max_length else "")


def for_markdown(text: str) -> str:
    """Escape a text for a line of Markdown, or a cell of `markdown.table`, which escapes bars."""
    line = " ".join(for_people(text).split())
    return MARKDOWN.sub(lambda match: _escaped(match[0]), line)


def code_span(text: str) -> str:
    """Put a text into a Markdown code span, whatever backticks it contains."""
    line = " ".join(for_people(text).split())
    ticks = _backticks(line, 1)
    margin = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{margin}{line}{margin}{ticks}"


def code_block(text: str) -> str:
    """Put a text into a Markdown code block, whatever backticks it contains."""
    text = visible(redact(text))
    fence = _backticks(text, 3)
    return f"{fence}text\n{text}\n{fence}"


def _escaped(mark: str) -> str:
    if mark.isdigit():
        return f"{mark}\\"  # in front of the full stop of a list
    return ENTITIES.get(mark, f"\\{mark}")


def _backticks(text: str, fewest: int) -> str:
    """Return a run of backticks that does not occur in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    return "`" * max(fewest, longest + 1)
