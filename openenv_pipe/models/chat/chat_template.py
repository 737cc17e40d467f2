"""Convert chat messages to token ids and back.

With the history `append`, sampled tokens are never rendered again. Later turns only append: the ids
between the model's last token and its next one, markup included, are taken from the chat template,
so that a conversation built turn by turn has exactly the ids of the template applied to the whole.
With `rerender`, the template renders the whole conversation for each prompt, replies included, and
may change what came before.

Tools are described once at the beginning: by the template, or in plain words if the template has no
tools or would move their description as the conversation grows. Calls stay in the text of replies
as the model wrote them. With `rerender`, they go into fields if the template shows them otherwise.

Where the model sees images, its placeholder tokens follow the note of each image
(`models/vision.py`).
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat.checks import (
    HistoryChoice,
    choose_history,
    template_takes_tools,
    text_shows_calls,
)
from openenv_pipe.models.chat.control_tokens import ControlTokens
from openenv_pipe.models.chat.messages import (
    calls_in_fields,
    calls_in_text,
    described,
    paired,
    results_as_user,
    tool_calls,
    tools_in_words,
)
from openenv_pipe.models.chat.probes import CALL, CALL_IN_FIELD, OPENING, REPLY, assistant
from openenv_pipe.models.chat.rendering import TemplateRenderer
from openenv_pipe.models.chat.reply_writer import ReplyWriter
from openenv_pipe.models.chat.turn_ends import find_turn_ends
from openenv_pipe.models.replies.reader import ReplyReader, reader_for
from openenv_pipe.models.vision import ImageFormat
from openenv_pipe.types import Image, Message, Tool

_log = logging.getLogger(__name__)

# Around the text of a message in `rendered_ids`: its index before it, and the end.
_MARKED = re.compile("\ue000(\\d+)\ue001(.*?)\ue002", re.DOTALL)
_MARKS = re.compile("\ue000\\d+\ue001|\ue002")
Replies = Mapping[int, Sequence[int] | None]  # by index; the sampled ids without the end token
NO_REPLIES: Replies = MappingProxyType({})
_Frozen = tuple[tuple[tuple[str, Any], ...], ...]  # messages as a cache key
_NUM_FIRST = 64  # cached beginnings, one for each of this many concurrent groups
_NUM_CACHED = 4096  # cached later messages and replies
_LONG_TEXT = 4096  # characters; longer texts go into a cache as small as that of beginnings


class ChatFormat:
    """The chat template of one tokenizer, and how a model that sees images reads them.

    Raises ConfigError: The tokenizer has no usable template, or the template rewrites earlier turns
    and the history is `append`: trained token ids would not be those that were sampled.
    """

    def __init__(
        self,
        tokenizer: Any,
        history: HistoryChoice = "append",
        images: ImageFormat | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        """history: auto is `append`, or `rerender` if the template rewrites earlier turns.

        images: None if the model reads text alone
        eos_ids: end tokens of the model's settings, besides the one that the template writes
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template; set model.chat_template to a Jinja template"
            )
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ConfigError(
                "the model has only a slow tokenizer, without a tokenizer.json; convert it with "
                "transformers, or choose a model that has one"
            )
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        added = tokenizer.added_tokens_decoder.values()
        self._special_tokens = [token.content for token in added if token.special]
        self.images = images
        if images is not None:
            self._special_tokens += images.tokens
        self._controls = ControlTokens(tokenizer, images.tokens if images else ())
        self.renderer = TemplateRenderer(tokenizer)
        self._render = self.renderer.render
        self._after_reply = self._render((*OPENING, assistant(REPLY)), prompt=False)
        begun = self._render(OPENING, prompt=True).rpartition(OPENING[0]["content"])[2]
        self.reply_reader = reader_for(
            self._special_tokens,
            begun,
            self.renderer.template,
            getattr(tokenizer, "response_template", None),
        )
        channels = self.reply_reader.form.channels
        # Ends a turn, and belongs to its text: a call without it is truncated.
        self._call_end = channels and tokenizer.convert_tokens_to_ids(channels.call_end)
        self._eos_ids = {*eos_ids, *([self._call_end] if self._call_end else [])}
        self.ends = find_turn_ends(tokenizer, self.renderer, self._special_tokens, self._eos_ids)
        self.reply_reader.turn_end = self.ends.text
        # Rendering takes longer than a step of a small environment, whose texts often repeat.
        # All members of a group have the same beginning.
        self._cached_first_ids = lru_cache(_NUM_FIRST)(self._first_ids)
        self._cached_following_ids = lru_cache(_NUM_CACHED)(self._following_ids)
        self._cached_short_ids = lru_cache(_NUM_CACHED)(self.encode)
        self._cached_long_ids = lru_cache(_NUM_FIRST)(self.encode)
        self.takes_tools = True
        self.has_fields = False  # the template reads calls and thoughts in fields of their own
        self.history = choose_history(self, history)
        in_text = template_takes_tools(self, assistant(CALL))
        in_fields = self.history == "rerender" and template_takes_tools(self, CALL_IN_FIELD)
        self.takes_tools = in_text or in_fields
        self.has_fields = in_fields and not (in_text and text_shows_calls(self))
        self._cached_first_ids.cache_clear()
        self._cached_following_ids.cache_clear()

    def __reduce__(self) -> tuple[type["ChatFormat"], tuple[Any, ...]]:
        """Pickle the tokenizer; the caches stay in this process."""
        return ChatFormat, (self.tokenizer, self.history, self.images, self._eos_ids)

    @property
    def sees_images(self) -> bool:
        """Whether images of messages are in the ids; else only their notes in the text are."""
        return self.images is not None

    def first_ids(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Return the ids of a conversation's beginning, up to where the model writes."""
        shown = self._shown(messages)
        ids = self._cached_first_ids(_frozen(messages, shown), json.dumps(tools) if tools else "[]")
        return self._with_images(ids, shown)

    def _first_ids(self, frozen: _Frozen, tools_json: str) -> Sequence[int]:
        messages = self._thawed(frozen)
        tools = self._controls.broken_up(json.loads(tools_json))
        return self._kept_apart(
            self._prompt_text(messages, tools),
            self._prompt_text(
                self._controls.guarded_messages(messages), self._controls.guarded(tools)
            ),
        )

    def rendered_ids(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), replies: Replies = NO_REPLIES
    ) -> list[int]:
        """Return the ids of a whole conversation, up to where the model writes.

        messages: untrusted ones from `without_markup`, and the model's own from `reply_message`
        replies: which of them are the model's own. The ids that it sampled are used wherever the
            template shows the reply as it is, because encoding its text again can give other ids;
            None: the text is encoded.
        """
        controls, ids = self._controls, list[int]()
        tools = controls.broken_up(list(tools))
        guarded_messages = controls.guarded_messages(messages, replies)
        guarded_tools = controls.guarded(tools)
        pieces, shown = self._pieces(messages, tools, replies)
        guarded, guarded_shown = self._pieces(guarded_messages, guarded_tools, replies)
        if shown != guarded_shown:
            pieces, shown = self._pieces(messages, tools)
            guarded, _ = self._pieces(guarded_messages, guarded_tools)
        for place, texts in enumerate(zip(pieces, guarded, strict=True)):
            ids += self._kept_apart(*texts)
            ids += (replies[shown[place]] or ()) if place < len(shown) else ()
        return ids

    def _pieces(
        self, messages: Sequence[Message], tools: Sequence[Tool], replies: Replies = NO_REPLIES
    ) -> tuple[list[str], list[int]]:
        """Return the text around the replies that it shows as sampled, and their indices.

        If the template looks into the messages, return the whole text in one piece.
        """
        sampled = {index for index, ids in replies.items() if ids is not None}
        text = self._conversation_text(messages, tools)
        if not sampled or _MARKS.search(text):
            return [text], []
        marked = [
            {**each, "content": f"\ue000{index}\ue001{each['content']}\ue002"}
            if index in sampled
            else each
            for index, each in enumerate(messages)
        ]
        marked_text = self._conversation_text(marked, tools)
        if _MARKS.sub("", marked_text) != text:
            return [text], []
        pieces, shown, place = list[str](), list[int](), 0
        for match in _MARKED.finditer(marked_text):
            if match[2] == messages[int(match[1])]["content"]:
                pieces.append(_MARKS.sub("", marked_text[place : match.start()]))
                shown.append(int(match[1]))
                place = match.end()
        return [*pieces, _MARKS.sub("", marked_text[place:])], shown

    def _kept_apart(self, text: str, guarded: str) -> Sequence[int]:
        """Encode a text, or its guarded form if that has other control tokens.

        If it has, untrusted text has formed a control token together with what stands next to it.
        """
        ids = self._piece_ids(text)
        guarded_ids = self._piece_ids(guarded)
        found, expected = self._controls.found_in(ids), self._controls.found_in(guarded_ids)
        if found == expected:
            return ids
        names = self.tokenizer.convert_ids_to_tokens([*({*found} ^ {*expected} or {*found})])
        _log.warning(
            "untrusted text and the chat template form control tokens together (%s); the model "
            "reads the text with guard characters around it",
            ", ".join(names),
        )
        return guarded_ids

    def _piece_ids(self, text: str) -> Sequence[int]:
        """Encode what stands between replies; most of it is cached from an earlier prompt."""
        return (self._cached_long_ids if len(text) > _LONG_TEXT else self._cached_short_ids)(text)

    def _conversation_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        if not self.takes_tools:
            messages = results_as_user(messages)
        elif self.has_fields:
            messages = paired(messages)
        return self._prompt_text(messages, tools)

    def _prompt_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        if tools and not self.takes_tools:
            messages, tools = tools_in_words(messages, tools), ()
        elif self.has_fields:
            tools = described(tools)
        return self._render(messages, prompt=True, tools=tools)

    def following_ids(self, messages: Sequence[Message], *, end: int | None) -> list[int]:
        """Return the ids between a completion and the next one.

        end: the token that ends the completion; None: it is truncated, and gets the template's end
            here, as a token that the model did not choose
        """
        shown = self._shown(messages)
        ids = self._cached_following_ids(_frozen(messages, shown), end)
        return self._with_images(ids, shown)

    def _following_ids(self, frozen: _Frozen, end: int | None) -> Sequence[int]:
        messages = self._thawed(frozen)
        turn_end = self._after_reply.rindex(self.ends.text or REPLY)
        turn_end += len(self.ends.text or REPLY)
        texts = []
        for each in (messages, self._controls.guarded_messages(messages)):
            shown = each if self.takes_tools else results_as_user(each)
            text = self._render((*OPENING, assistant(REPLY), *shown), prompt=True)[turn_end:]
            if end is None:
                text = self.ends.text + text
            elif not self.ends.text:
                # The model has written the next message's first token.
                text = text.lstrip("\n").removeprefix(self.tokenizer.convert_ids_to_tokens(end))
            texts.append(text)
        return self._kept_apart(*texts)

    def _shown(self, messages: Sequence[Message]) -> list[dict[str, Image]]:
        """Return for each message the images that the model sees, by their notes, in order."""
        return [self.images.shown_in(each) if self.images else {} for each in messages]

    def _thawed(self, frozen: _Frozen) -> list[Message]:
        """Return the messages of a cache key, with placeholders after the note of each image."""
        messages: list[Message] = []
        for items in frozen:
            message = dict(items)
            notes = message.pop("images", ())
            (harmless,) = self.without_markup([message])
            marked = harmless["content"]
            for note in notes:
                assert self.images is not None
                marked = marked.replace(note, note + "".join(self.images.tokens), 1)
            messages.append({**harmless, "content": marked})
        return messages

    def _with_images(self, ids: Sequence[int], shown: Sequence[dict[str, Image]]) -> list[int]:
        """Return the ids with the id of each image in the place of its placeholder."""
        images = [image for each in shown for image in each.values()]
        return self.images.with_ids(ids, images) if self.images and images else [*ids]

    def cut(self, text: str, max_tokens: int) -> str:
        """Return the text; of one with more than `max_tokens`, the first and the last tokens.

        A note between them says how many were left out; its own tokens are not counted.
        """
        ids = self.encode(text)
        if len(ids) <= max_tokens:
            return text
        num_last = max_tokens // 2
        kept = [ids[: max_tokens - num_last], ids[len(ids) - num_last :]]
        first, last = (self._backend.decode(each, skip_special_tokens=False) for each in kept)
        return f"{first}\n[{len(ids) - max_tokens} tokens left out]\n{last}"

    def reply_text(self, completion_ids: Sequence[int]) -> str:
        """Decode a completion without its end-of-turn token, unless that completes a call."""
        end = completion_ids[-1] if completion_ids else None
        ended = end in self.ends.ids and end != self._call_end
        ids = completion_ids[:-1] if ended else completion_ids
        return self._backend.decode(list(ids), skip_special_tokens=False)

    @property
    def keeps_text(self) -> bool:
        """Whether replies go back into prompts as one text."""
        return self.reply_reader.form.channels is None and not self.has_fields

    def reply_message(
        self, reply: str, tools: Sequence[Tool] = (), *, is_sampled: bool = True
    ) -> Message:
        """Return a reply as the message that `rendered_ids` takes.

        Most templates find thoughts and calls in the text of a reply.

        is_sampled: False for what a client calls a reply; its special tokens are broken up.
        """
        harmless = self._controls.special_broken_up
        if self.keeps_text:
            return assistant(reply if is_sampled else harmless(reply))
        if not self.has_fields:
            visible, thought, _ = self.reply_reader.without_channels(reply)
            text = visible or ("" if thought else reply)
            return {**assistant(harmless(text)), "thinking": harmless(thought)}
        # A client's reply does not continue the thought that the prompt may have opened.
        reader = self.reply_reader if is_sampled else ReplyReader(self.reply_reader.form)
        read = reader.read(reply, tools)
        calls, thought = read.made_calls, read.thought
        text = read.text or ("" if thought or calls else reply)
        if calls and self.reply_reader.form.channels:
            # gpt-oss's template takes only one of text and thought before a call.
            text, thought = "", "\n".join(each for each in (thought, text) if each)
        is_native = "reasoning_content" in self.renderer.template
        named = ({"name": call.name, "arguments": dict(call.arguments)} for call in calls)
        return {
            **assistant(harmless(text)),
            "reasoning_content" if is_native else "thinking": harmless(thought),
            **self._controls.special_broken_up(tool_calls(named)),
        }

    def reply_ids(self, reply: str) -> list[int]:
        """Encode a reply that was not sampled (a scripted one), with its end-of-turn token."""
        ids = [*self._cached_short_ids(reply)]
        if ids and ids[-1] == self._call_end:
            return ids
        has_calls = self.takes_tools and bool(self.reply_reader.read(reply).calls)
        return [*ids, self.ends.of_reply(has_calls=has_calls)]

    @cached_property
    def writer(self) -> ReplyWriter:
        return ReplyWriter(self)

    def without_markup(self, messages: Iterable[Message]) -> list[Message]:
        """Break up control tokens in untrusted text, so that it cannot forge turns.

        The markup around the calls of a message is written after that.
        """
        with_calls = calls_in_fields if self.has_fields else calls_in_text
        return [
            with_calls(
                {
                    key: value if key == "role" else self._controls.broken_up(value)
                    for key, value in message.items()
                }
            )
            for message in messages
        ]

    def encode(self, text: str) -> list[int]:
        """Encode text; lone surrogates, which JSON can hold and tokenizers reject, become `?`."""
        text = text.encode(errors="replace").decode()
        return self._backend.encode(text, add_special_tokens=False).ids


def _frozen(messages: Sequence[Message], shown: Sequence[dict[str, Image]]) -> _Frozen:
    """Return messages as keys of a cache, with the notes of the images that the model sees."""
    return tuple(
        (
            *(item for item in message.items() if item[0] != "images"),
            *([("images", tuple(images))] if images else []),
        )
        for message, images in zip(messages, shown, strict=True)
    )
