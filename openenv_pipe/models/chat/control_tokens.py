"""Keep a tokenizer's control tokens out of untrusted text.

Untrusted is what the model has not written: observations, tools, the text of tasks and programs.
A control token in it could forge a turn, a thought or a tool's result. Added tokens of white space
and of one character, as tokenizers have them for line breaks, are ordinary text.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from openenv_pipe.errors import ConfigError
from openenv_pipe.types import Message

# What the pipeline and many templates write around calls and results, control tokens or not.
_FENCE = re.compile(r"</?tool_(?:call|response)>")
_SPACE = " \t\r\n\u2581"  # SentencePiece's included
_GUARDS = "\u00b7\u00a6\u00a7"
_MAX_PASSES = 20
_WORDS_OF_TOOLS = frozenset(  # templates look for them
    (
        *("type", "function", "name", "description", "parameters", "strict", "return", "returns"),
        "arguments",
        *("properties", "required", "items", "prefixItems", "additionalProperties", "nullable"),
        *("enum", "const", "default", "examples", "title", "format", "pattern"),
        *("anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "definitions", "uniqueItems"),
        *("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"),
        *("string", "number", "integer", "boolean", "array", "object", "null"),
    )
)


class ControlTokens:
    """The control tokens of one tokenizer, and how text is kept apart from them."""

    def __init__(self, tokenizer: Any, more: Collection[str] = ()) -> None:
        """more: tokens that are control tokens, whether they are marked as such or not."""
        self._backend = tokenizer.backend_tokenizer
        added = tokenizer.added_tokens_decoder
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        self._special_ids.update(tokenizer.convert_tokens_to_ids(list(more)))
        self._ids = self._special_ids | {
            token_id
            for token_id, token in added.items()
            if len(token.content) > 1 and token.content.strip(_SPACE)
        }
        contents = "".join(token.content for token in added.values())
        self._guard = next(each for each in _GUARDS if each not in contents)

    def found_in(self, ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in self._ids]

    def broken_up(self, value: Any) -> Any:
        """Put a space into whatever the tokenizer would read as a control token in JSON data."""
        return _changed(value, lambda text: self._broken_up(text, self._ids, _FENCE))

    def special_broken_up(self, value: Any) -> Any:
        """Break up special tokens only, so that a reply keeps its thoughts and calls."""
        return _changed(value, lambda text: self._broken_up(text, self._special_ids, None))

    def _broken_up(self, text: str, ids: set[int], fence: re.Pattern[str] | None) -> str:
        text = text.encode(errors="replace").decode()  # Tokenizers reject lone surrogates.
        for _ in range(_MAX_PASSES):
            spans = {match.span() for match in fence.finditer(text)} if fence else set()
            # The tokenizer itself finds them, because it may normalize the text before.
            encoding = self._backend.encode(text, add_special_tokens=False)
            if not ids.isdisjoint(encoding.ids):
                pairs = zip(encoding.ids, encoding.offsets, strict=True)
                spans |= {span for token_id, span in pairs if token_id in ids}
            if not spans:
                return text
            for start, end in sorted(spans, reverse=True):
                first = start + len(text[start:end]) - len(text[start:end].lstrip())
                rest = text[first + 1 : end]
                text = text[: first + 1 if rest else first] + " " + rest + text[end:]
        raise ConfigError(
            f"the tokenizer reads control tokens in {text!r:.80} however they are broken up; "
            "choose a model with another tokenizer"
        )

    def guarded(self, value: Any) -> Any:
        """Put a sign that no control token contains around all texts of JSON data.

        No part of them then forms a control token with what a template writes next to it.
        """

        def guard(text: str) -> str:
            is_plain = not text or text in _WORDS_OF_TOOLS
            return text if is_plain else f"{self._guard}{text}{self._guard}"

        return _changed(value, guard)

    def guarded_messages(
        self, messages: Sequence[Message], replies: Collection[int] = ()
    ) -> list[Message]:
        """Guard the texts of messages. replies: the indices of those that the model wrote."""
        return [
            message
            if index in replies
            else {
                key: text if key == "role" else self.guarded(text) for key, text in message.items()
            }
            for index, message in enumerate(messages)
        ]


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return JSON data with all texts changed, names of fields included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _changed(each, change) for key, each in value.items()}
    return [_changed(each, change) for each in value] if isinstance(value, list) else value
