"""How models mark thoughts and calls in their replies, as data.

`formats.json` has a row for each format. A row's `template` is a `response_template`, the
data format of transformers and of model repositories; a tokenizer's own comes before the table.
What a row says beyond it: tokens by which the format is found (`found_by`), what begins a call
whatever follows (`call_mark`), marks around all calls of a reply (`block`), and what the format
cannot express (`ambiguous`).

Source: docs/source/en/chat_response_parsing.md of transformers.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from openenv_pipe.models.replies.channels import Channels
from openenv_pipe.models.replies.values import Dialect
from openenv_pipe.system.patterns import LIMIT_S, SlowPatternError, compile_untrusted

THINK = ("<think>", "</think>")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of the field
_NAMED = re.compile(r"\(\?P<\w+>")
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_LITERAL = re.compile(r"(?:[^\\\[\](){}.*+?|^$]|\\[^\w\s])+(?![*?{])")
_SPACE_AROUND = re.compile(r"^(?:\\s[*+]\??)+|(?:\\s[*+]\??)+$")
_CONTENTS = ("json", "xml-inline", "python-call-list")

Compile = Callable[[str], re.Pattern[str]]

_log = logging.getLogger(__name__)

_ends_at: ContextVar[float] = ContextVar("_ends_at")  # in processor time


@contextmanager
def within_limit() -> Iterator[None]:
    """Within the block, the searches of untrusted patterns share one time limit."""
    token = _ends_at.set(time.process_time() + LIMIT_S)
    try:
        yield
    finally:
        _ends_at.reset(token)


def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def limited(pattern: str) -> Any:
    """Compile an untrusted pattern; its searches raise SlowPatternError.

    It has the methods of `re.Pattern` that readers use. Raises ValueError.
    """
    return _Limited(pattern)


class _Limited:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._regex = compile_untrusted(pattern, re.DOTALL)

    def search(self, *where: Any) -> Any:
        return self._within_limit(self._regex.search, where)

    def match(self, *where: Any) -> Any:
        return self._within_limit(self._regex.match, where)

    def fullmatch(self, *where: Any) -> Any:
        return self._within_limit(self._regex.fullmatch, where)

    def finditer(self, *where: Any) -> Iterator[Any]:
        found = self._within_limit(self._regex.finditer, where)
        while (each := self._within_limit(lambda timeout: next(found, None), ())) is not None:
            yield each

    def _within_limit(self, method: Callable[..., Any], where: tuple[Any, ...]) -> Any:
        now = time.process_time()
        left = _ends_at.get(now + LIMIT_S) - now
        try:
            if left > 0:
                return method(*where, timeout=left)
        except TimeoutError:
            pass
        raise SlowPatternError(f"the model's {self.pattern!r:.80} takes too long")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tags:
    """Marks around each argument of a call."""

    opening: re.Pattern[str]  # has the group `key`
    closing: re.Pattern[str]
    has_lines: bool  # a line break at each end of a value belongs to the marks


@dataclass(frozen=True, kw_only=True, slots=True)
class CallForm:
    """One way to write a call, or a list of them."""

    opening: re.Pattern[str]  # may have the group `name`
    closing: re.Pattern[str] | None  # None: the content has an end of its own
    end_mark: str  # for messages: the closing pattern
    content: str  # json, xml-inline or python-call-list
    is_list: bool  # of calls
    function: Any  # where the content has name and arguments, in placeholders
    tags: Tags | None = None
    dialect: Dialect | None = None  # of JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyFormat:
    """How the models of a family mark the parts of their replies."""

    name: str
    thought: tuple[str, str]  # regular expressions
    calls: Sequence[CallForm]
    call_mark: str = ""  # begins a call even if what follows has none of the forms; empty: none
    content_marks: Sequence[str] = ()  # around the text besides thoughts and calls
    block: tuple[str, str] | None = None  # around all calls
    channels: Channels | None = None  # around all of it
    compile: Compile = compiled
    ambiguous: str = ""  # what cannot be read, by the design of the format


def _form(compile: Compile, spec: Mapping[str, Any]) -> CallForm:
    content, arguments = spec.get("content", "text"), spec.get("content_args", {})
    if content not in _CONTENTS:
        raise ValueError(f"content is {content!r}, expected one of {', '.join(_CONTENTS)}")
    transform: Any = spec.get("transform")
    is_list = bool(spec.get("transform_each"))
    if transform is None:
        transform = {"name": "{name}", "arguments": "{arguments}"} if is_list else "{content}"
    closing = _pattern(spec, "close")
    delims = arguments.get("string_delims", ())
    bare_keys = bool(arguments.get("unquoted_keys"))
    return CallForm(
        opening=compile(_pattern(spec, "open")),
        closing=compile(closing) if closing else None,
        end_mark=spec.get("close", closing.replace("\\", "").replace("s*", "")),
        content=content,
        is_list=is_list,
        function=transform if isinstance(transform, str) else transform.get("function", transform),
        tags=_tags(compile, arguments["tag_pattern"]) if content == "xml-inline" else None,
        dialect=Dialect(strings=dict(delims), bare_keys=bare_keys) if delims or bare_keys else None,
    )


def _pattern(spec: Mapping[str, Any], key: str) -> str:
    """Return what opens or closes a field, as a regular expression; empty: nothing does."""
    marks = spec.get(key, ())
    marks = [marks] if isinstance(marks, str) else sorted(marks, key=len, reverse=True)
    pattern: str = spec.get(f"{key}_pattern", "|".join(map(re.escape, marks)))
    re.compile(f"(?:{unnamed(pattern)})")  # as a part of others, as readers use it
    # Space around marks is skipped anyway, and searching for it takes quadratic time.
    return _SPACE_AROUND.sub("", pattern)


def _tags(compile: Compile, pattern: str) -> Tags:
    """Take a pattern of a whole argument apart, so that each end of its value can be tried.

    Raises ValueError if it is not a key and then a value with a mark after it.
    """
    opening, _, rest = pattern.partition("(?P<value>")
    end = _end_of_group(rest)
    closing = _SPACE_AROUND.sub("", rest[end:])
    if "(?P<key>" not in opening or not closing:
        raise ValueError(
            f"tag_pattern={pattern!r} needs a group (?P<key>...), then a group (?P<value>...), and "
            "a closing mark behind it"
        )
    stripped = _SPACE_AROUND.sub("", opening)
    return Tags(opening=compile(stripped), closing=compile(closing), has_lines=stripped != opening)


def _end_of_group(pattern: str) -> int:
    """Return where the group ends that has begun before a pattern."""
    depth, is_escaped = 1, False
    for index, each in enumerate(pattern):
        if is_escaped or each == "\\":
            is_escaped = not is_escaped
        else:
            depth += (each == "(") - (each == ")")
        if depth == 0:
            return index + 1
    raise ValueError(f"a group of {pattern!r} has no end")


def _template_format(
    template: Mapping[str, Any],
    name: str,
    row: Mapping[str, Any] | None = None,
    compile: Compile = compiled,
) -> ReplyFormat:
    """Return the format that a `response_template` describes.

    row: what the table says beyond it

    Raises ValueError, KeyError, TypeError, AttributeError, re.error: it is not one, or has parts
    that are not read here.
    """
    fields, row = template["fields"], row or {}
    specs = fields.get("tool_calls", ())
    specs = [specs] if isinstance(specs, Mapping) else specs
    thought = next((fields[each] for each in _THOUGHTS if each in fields), None)
    marks = (_pattern(thought, "open"), _pattern(thought, "close")) if thought else THINK
    if marks[0].startswith("(?="):  # The template of prompts opens the thought.
        marks = (marks[1].replace("</", "<", 1), marks[1])
    first = _LITERAL.match(_pattern(specs[0], "open")) if specs else None
    found = re.sub(r"\\(.)", r"\1", first[0]) if first else ""
    content = fields.get("content", {})
    ends = [content[each] for each in ("open", "close") if "open" in content]
    return ReplyFormat(
        name=name,
        thought=marks,
        compile=compile,
        calls=tuple(map(partial(_form, compile), specs)),
        call_mark=row.get("call_mark", "" if found.startswith("{") else found.strip()),
        content_marks=[each for each in ends if isinstance(each, str)],
        block=(row["block"][0], row["block"][1]) if "block" in row else None,
        ambiguous=row.get("ambiguous", ""),
    )


def resolved(template: Any, scope: Mapping[str, Any]) -> Any:
    """Return what a transform's placeholders stand for; None if the scope lacks it."""
    if isinstance(template, Mapping):
        return {key: resolved(each, scope) for key, each in template.items()}
    match = _PLACEHOLDER.fullmatch(template) if isinstance(template, str) else None
    if match is None:
        return template
    value: Any = scope
    for key in match[1].split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def unnamed(pattern: str) -> str:
    """Return a regular expression whose groups have no names, so that it can be part of others."""
    return _NAMED.sub("(?:", pattern)


_TABLE: Mapping[str, Any] = json.loads(
    Path(__file__).with_name("formats.json").read_text(encoding="utf-8")
)
FORMATS: Mapping[str, ReplyFormat] = {
    name: _template_format(row["template"], name, row) for name, row in _TABLE.items()
} | {
    "gpt_oss": ReplyFormat(
        name="gpt_oss",
        thought=THINK,
        calls=(),
        channels=Channels(
            start="<|start|>",
            channel="<|channel|>",
            text="<|message|>",
            ends=("<|end|>", "<|return|>"),
            call_end="<|call|>",
            thoughts="analysis",
        ),
    )
}
HERMES, HARMONY = FORMATS["hermes"], FORMATS["gpt_oss"]


def format_of(
    special_tokens: Collection[str], chat_template: str, response_template: Any = None
) -> ReplyFormat:
    """Return the format of a model.

    special_tokens: of its tokenizer. response_template: of its tokenizer's configuration, if any.
    """
    assert HARMONY.channels is not None
    if HARMONY.channels.channel in special_tokens:
        return HARMONY

    def is_found(mark: str) -> bool:
        return mark in special_tokens or mark in chat_template

    rows = ((FORMATS[name], _TABLE[name]["found_by"]) for name in _TABLE)
    found = next((form for form, marks in rows if any(map(is_found, marks))), HERMES)
    if response_template is None:
        return found
    try:
        own = _template_format(response_template, "response_template", compile=limited)
    except (ValueError, KeyError, TypeError, AttributeError, re.error) as error:
        _log.warning(
            "response_template of the tokenizer cannot be used (%s); its replies are read in the "
            "format %s",
            error,
            found.name,
        )
        return found
    # The tokens that the format is found by tell which row adds what a response_template lacks.
    return replace(own, block=found.block, content_marks=own.content_marks or found.content_marks)
