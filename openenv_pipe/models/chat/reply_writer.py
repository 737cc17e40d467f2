"""Write replies that the model has not sampled in the model's own format.

They are those of data sets, of scripted policies and of other models. What stands around a reply's
text differs between models: a prompt may have opened a thought, which the reply has to close, and
gpt-oss names a channel before each text. The chat template writes all that around a message.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat.messages import calls_in_text, paired, tool_calls
from openenv_pipe.models.chat.probes import OPENING, assistant
from openenv_pipe.models.replies.formats import THINK
from openenv_pipe.models.replies.reader import PLAIN_READER, ReplyReader
from openenv_pipe.models.replies.reply import Reply
from openenv_pipe.types import Message, Tool

if TYPE_CHECKING:
    from openenv_pipe.models.chat.chat_template import ChatFormat

_NUM_CACHED = 4096  # replies, which often repeat in small environments
_Meaning = tuple[list[tuple[str, dict[str, Any]]], str, str, bool]


class ReplyWriter:
    def __init__(self, chat: "ChatFormat") -> None:
        self._chat = chat
        self._form = chat.reply_reader.form
        # Of texts that others wrote: the prompt has opened no thought for them.
        self._reader = ReplyReader(self._form)
        self._cached_own_text = lru_cache(_NUM_CACHED)(self._own_text)
        self._cached_opening = lru_cache(_NUM_CACHED)(self._opening)

    def own_text(self, reply: str, tools: Sequence[Tool] = ()) -> str:
        """Return a reply as the model writes it, or as it is if the model's format lacks a part."""
        return self._cached_own_text(reply, json.dumps(list(tools)))

    def _own_text(self, reply: str, tools_json: str) -> str:
        written = self.of_message(assistant(reply), json.loads(tools_json))
        return reply if written is None else written

    def of_message(self, message: Message, tools: Sequence[Tool] = ()) -> str | None:
        """Return a message of the assistant as the model writes it.

        Calls and thoughts may be in fields of their own or in the text. What is returned is read
        as the same calls, thought and text. None: the model's format has no place for one of them.
        """
        read = self._read(message["content"], tools)
        given = [each["function"] for each in message.get("tool_calls", ())]
        calls = [(each["name"], dict(each["arguments"])) for each in given]
        thought = message.get("reasoning_content", "").strip() or read.thought
        expected = (calls or _meaning_of(read)[0], thought, read.text, read.is_thinking)
        if expected[0] and self._form.channels:
            # gpt-oss's template takes only one of text and thought before a call.
            thought = "\n".join(each for each in (thought, read.text) if each)
            expected = (expected[0], thought, "", read.is_thinking)
        for text in self._candidates(message, expected, tools):
            if _meaning_of(self._chat.reply_reader.read(text, tools)) == expected:
                return text
        return None

    def _read(self, content: str, tools: Sequence[Tool]) -> Reply:
        """Read a text of others, whose thought may be marked in another way than the model's."""
        read = self._reader.read(content, tools)
        is_plain = content.lstrip().startswith(THINK[0]) and not read.thought
        return PLAIN_READER.read(content, tools) if is_plain else read

    def _candidates(
        self, message: Message, meaning: _Meaning, tools: Sequence[Tool]
    ) -> Iterator[str]:
        calls, thought, text, _ = meaning
        functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
        is_native = "reasoning_content" in self._chat.renderer.template
        key = "reasoning_content" if is_native else "thinking"
        shown = {key: thought} if thought else {}
        (split,) = paired([{**assistant(text), **shown, **tool_calls(functions)}])
        # A template that shows fields in another way than text is given fields.
        for each in (split, message) if self._chat.has_fields else (message, split):
            yield self._by_template(each, tools)
        given = [each["function"] for each in message.get("tool_calls", ())]
        yield _with_calls(message["content"], given)
        if self._chat.reply_reader.begins_in_thought:
            end = self._form.thought[1].replace("\\", "")
            yield f"{thought}\n{end}\n\n{_with_calls(text, functions)}"

    def _by_template(self, message: Message, tools: Sequence[Tool]) -> str:
        """Return a reply as the chat template writes it; an empty text if it cannot."""
        end = self._chat.ends.text
        try:
            begun = self._cached_opening(json.dumps(list(tools)))
            whole = self._chat.renderer.render((*OPENING, message), prompt=False, tools=tools)
        except ConfigError:
            return ""
        # Nemotron's template begins a thought with a line break, but writes none if it is empty.
        begun = begun if whole.startswith(begun) else begun.rstrip()
        if not whole.startswith(begun):
            return ""
        written = whole.removeprefix(begun)
        channels = self._form.channels
        if channels and written.endswith(channels.call_end):  # It ends the turn, too.
            return written
        return written.rpartition(end)[0] if end else written

    def _opening(self, tools_json: str) -> str:
        """Return the prompt that replies are written after. Raises ConfigError."""
        return self._chat.renderer.render(OPENING, prompt=True, tools=json.loads(tools_json))


def _meaning_of(read: Reply) -> _Meaning:
    calls = [(call.name, dict(call.arguments)) for call in read.made_calls]
    return calls, read.thought, read.text, read.is_thinking


def _with_calls(text: str, functions: Sequence[Mapping[str, Any]]) -> str:
    calls = [json.dumps(each, ensure_ascii=False) for each in functions]
    return calls_in_text({"content": text, "calls": calls})["content"]
