"""Find the model's own replies in the histories that a program sends.

With each call a program sends its whole conversation, as messages. The model has to see its own
replies as it sampled them: text that is encoded again can give other ids. A reply is recognised by
the ids of its tool calls, else by where it stands: by the messages before it. Two replies may look
the same to the program, such as "yes" and " yes" to one that strips them, but what stands before
them tells them apart.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from openenv_pipe.extras.agents.http.chat_completions import (
    MessageKey,
    call_ids_of,
    message_key,
    text_of,
)


@dataclass(frozen=True, slots=True)
class KnownReply:
    text: str
    ids: tuple[int, ...]  # without the end-of-turn token


@dataclass(frozen=True, slots=True)
class _Place:
    history: bytes  # a digest of all messages before it
    before: bytes  # a digest of the last of them


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    reply: KnownReply
    place: _Place
    text: str  # of the message
    call_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FoundReplies:
    replies: dict[int, KnownReply]  # by the index of the message
    num_unknown: int  # messages of the assistant that are not replies of the model
    num_ambiguous: int  # messages that could be one of several replies


class KnownReplies:
    def __init__(self) -> None:
        self._given: dict[MessageKey, list[_Given]] = {}

    def add(
        self,
        history: Sequence[Mapping[str, Any]],
        message: Mapping[str, Any],
        text: str,
        ids: Iterable[int],
    ) -> None:
        """Remember a reply.

        history: the messages that the program sent. message: what it got.
        text: the raw text of the reply. ids: without the end-of-turn token.
        """
        *_, place = _places(history)
        given = _Given(
            reply=KnownReply(text, tuple(ids)),
            place=place,
            text=text_of(message.get("content")),
            call_ids=call_ids_of(message),
        )
        self._given.setdefault(message_key(message), []).append(given)

    def find(self, history: Sequence[Mapping[str, Any]]) -> FoundReplies:
        found: dict[int, KnownReply] = {}
        num_unknown = num_ambiguous = 0
        for index, (message, place) in enumerate(zip(history, _places(history), strict=False)):
            if message.get("role") != "assistant":
                continue
            replies = self._candidates(message, place)
            if len({reply.text for reply in replies}) == 1:
                # Equal texts may have different ids; the last one is what the program went on with.
                found[index] = replies[-1]
            elif replies:
                num_ambiguous += 1
            else:
                num_unknown += 1
        return FoundReplies(found, num_unknown, num_ambiguous)

    def _candidates(self, message: Mapping[str, Any], place: _Place) -> list[KnownReply]:
        """Return the replies that a message may be, by the surest of the ways to tell."""
        given = self._given.get(message_key(message), [])
        ids, text = call_ids_of(message), text_of(message.get("content"))
        by_id = [each for each in given if ids and each.call_ids == ids]
        by_place = [each for each in given if each.place == place]
        # For a history whose beginning has changed, as by compaction or a clock.
        by_last = [each for each in given if each.place.before == place.before]
        chosen = by_id or by_place or by_last or given
        if text != text.strip():
            # The program does not strip what it gets, so its text is exact.
            chosen = [each for each in chosen if each.text == text]
        return [each.reply for each in chosen]


def _places(history: Sequence[Mapping[str, Any]]) -> list[_Place]:
    """Return the place of each message, and that of the next one to come."""
    digest, before = blake2b(digest_size=16), b""
    places = [_Place(digest.digest(), before)]
    for message in history:
        _, calls = message_key(message)
        seen = [message.get("role"), text_of(message.get("content")), calls]
        before = blake2b(json.dumps(seen).encode(), digest_size=16).digest()
        digest.update(before)
        places.append(_Place(digest.digest(), before))
    return places
