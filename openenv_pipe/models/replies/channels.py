"""Take apart replies of models that write each part into a channel of its own, such as gpt-oss."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NAME = re.compile(r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_QUOTES = re.compile(r'\\.|"', re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Channels:
    """The marks of a format with channels.

    A message is a header, which names its channel, and a text. If the header also names a
    recipient, the message is a call, and the text is its arguments.
    """

    start: str  # of a message; the author's role follows
    channel: str  # the channel's name follows
    text: str  # ends the header
    ends: Sequence[str]  # end the text of a message
    call_end: str  # ends the text of a call
    thoughts: str  # the channel of thoughts


class ChannelMessage:
    """One message of a reply, whose text is read piece by piece."""

    def __init__(self, is_thought: bool, recipient: str, first: str) -> None:
        """recipient: the tool that is called; empty: the message is not a call."""
        self.is_thought = is_thought
        self.recipient = recipient
        self.end = ""  # the mark that ends it; empty: the reply ends first
        self._pieces: list[str] = []
        self._is_in_string = False
        self._is_json: bool | None = False if is_thought else None  # None: there is nothing yet
        self.add(first)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def contains(self, mark: str, channels: Channels) -> bool:
        """Whether a mark after the text so far is part of it."""
        is_text = mark == channels.text or (self.is_thought and mark not in channels.ends)
        return self._is_in_string or is_text

    def add(self, *pieces: str) -> None:
        for piece in pieces:
            self._pieces.append(piece)
            if self._is_json is None and (begin := piece.lstrip()):
                self._is_json = begin.startswith(("{", '"') if self.recipient else "{")
            if self._is_json:
                num_quotes = sum(match[0] == '"' for match in _QUOTES.finditer(piece))
                self._is_in_string ^= num_quotes % 2 == 1


def channel_messages(
    reply: str, channels: Channels, *, begins_in_thought: bool
) -> list[ChannelMessage]:
    """Return the messages of a reply, in order. Text outside of messages is a message, too.

    Marks in the strings of a JSON text are part of them. A thought ends only at a mark that ends
    messages: all other marks in it are part of it.
    """
    marks = (channels.start, channels.channel, channels.text, *channels.ends, channels.call_end)
    first, *pieces = re.split(f"({'|'.join(map(re.escape, marks))})", reply)
    messages: list[ChannelMessage] = []
    recipient, name = "", channels.thoughts if begins_in_thought else ""

    def begun(piece: str) -> ChannelMessage:
        called = recipient or _recipient(name)
        channel = _NAME.match(name)
        is_thought = bool(channel and channel[1] == channels.thoughts and not called)
        messages.append(ChannelMessage(is_thought, called, piece))
        return messages[-1]

    message = None  # in a header, or between messages
    if pieces and pieces[0] == channels.channel and _RECIPIENT.match(first.lstrip()):
        # The prompt ends with the author of the reply, and the reply goes on with a recipient.
        recipient = _recipient(first)
    elif first.strip():
        message = begun(first)
    for mark, piece in zip(pieces[::2], pieces[1::2], strict=True):
        if message and message.contains(mark, channels):
            message.add(mark, piece)
        elif mark == channels.text:
            message = begun(piece)
        else:
            is_header = message is None
            if message:
                message.end = mark
            message = None
            if mark == channels.channel:
                # A header that names a channel again keeps its recipient.
                recipient = recipient or (_recipient(name) if is_header else "")
                name = piece
            elif mark == channels.start:
                recipient, name = _recipient(piece), ""
            else:
                recipient = name = ""
                message = begun(piece) if piece.strip() else None
    return messages


def _recipient(header: str) -> str:
    match = _RECIPIENT.search(header)
    return match[1] if match else ""
