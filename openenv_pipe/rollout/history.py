"""The prompts of one conversation, in token ids: how each follows from the turns before it."""

from collections.abc import Sequence
from typing import Protocol

from openenv_pipe.algorithms.call_graph import place_call
from openenv_pipe.algorithms.prefix_tree import common_prefix
from openenv_pipe.rollout.context import Chat
from openenv_pipe.types import PREVIOUS, Episode, Finish, Message, Tool


class PromptHistory(Protocol):
    """The prompt of the next turn. `model.history` chooses the class."""

    new_ids: list[int]  # the turn's prompt_ids
    parent: int | None  # the turn's parent
    num_tokens: int  # of the whole prompt
    num_kept: int | None  # tokens of the last prompt and completion that it keeps; None: all

    def add(self, messages: Sequence[Message]) -> None:
        """Add the messages that follow the episode's last turn."""

    @property
    def unknown_ids(self) -> list[int]:
        """What follows the kept tokens in the prompt."""


class AppendedHistory:
    """Prompts that only grow: what was sampled stays as it is."""

    parent: int | None = PREVIOUS
    num_kept: int | None = None

    def __init__(
        self, chat: Chat, episode: Episode, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> None:
        self._chat = chat
        self._episode = episode
        self.new_ids = chat.first_ids(messages, tools)
        self.num_tokens = len(self.new_ids)

    def add(self, messages: Sequence[Message]) -> None:
        turn = self._episode.turns[-1]
        end = turn.completion_ids[-1] if turn.finish is Finish.STOP else None
        self.new_ids = self._chat.following_ids(messages, end=end)
        self.num_tokens = self._episode.num_tokens + len(self.new_ids)

    @property
    def unknown_ids(self) -> list[int]:
        return self.new_ids


class RerenderedHistory:
    """Prompts that the template renders from all messages, each placed in the episode's graph."""

    def __init__(
        self, chat: Chat, episode: Episode, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> None:
        self._chat = chat
        self._episode = episode
        self._tools = tools
        self._messages = chat.without_markup(messages)
        self._replies: dict[int, None] = {}  # the indices of those that the model wrote
        self._prompt: list[int] = []
        self._render([])

    def add(self, messages: Sequence[Message]) -> None:
        turn = self._episode.turns[-1]
        self._replies[len(self._messages)] = None
        self._messages.append(self._chat.reply_message(turn.reply))
        self._messages += self._chat.without_markup(messages)
        self._render(self._prompt + turn.completion_ids)

    @property
    def unknown_ids(self) -> list[int]:
        return self._prompt[self.num_kept :]

    def _render(self, known: Sequence[int]) -> None:
        """Render the next prompt. known: the token ids of the conversation so far"""
        prompt = self._chat.rendered_ids(self._messages, self._tools, self._replies)
        self._prompt = prompt
        self.num_tokens = len(prompt)
        self.parent, self.new_ids = place_call(self._episode.turns, prompt)
        # The model has to compute at least the last token, from which it samples.
        self.num_kept: int | None = common_prefix(prompt[:-1], known)


HISTORIES: dict[str, type[AppendedHistory] | type[RerenderedHistory]] = {
    "append": AppendedHistory,
    "rerender": RerenderedHistory,
}
