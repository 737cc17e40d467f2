"""The prompts of one conversation, in token ids: how each follows from the turns before it."""

from collections.abc import Sequence
from typing import Protocol

from openenv_pipe.algorithms.call_graph import place_call
from openenv_pipe.rollout.context import Chat
from openenv_pipe.types import PREVIOUS, Finish, Message, Tool, Turn


class PromptHistory(Protocol):
    """The prompt of the next turn. `model.history` chooses the class."""

    prompt_ids: list[int]  # the whole prompt
    new_ids: list[int]  # the prompt_ids of the turn: those that follow its parent
    parent: int | None  # the turn's parent

    def add(self, turn: Turn, messages: Sequence[Message]) -> None:
        """Add a turn, which answers the present prompt, and the messages that follow it."""


class AppendedHistory:
    """`append`: each prompt is the one before it, the sampled ids and what followed them."""

    parent: int | None = PREVIOUS

    def __init__(self, chat: Chat, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        self._chat = chat
        self.prompt_ids = self.new_ids = chat.first_ids(messages, tools)

    def add(self, turn: Turn, messages: Sequence[Message]) -> None:
        end = turn.completion_ids[-1] if turn.finish is Finish.STOP else None
        self.new_ids = self._chat.following_ids(messages, end=end)
        self.prompt_ids = [*self.prompt_ids, *turn.completion_ids, *self.new_ids]


class RerenderedHistory:
    """`rerender`: the template renders each prompt anew, from all messages."""

    def __init__(self, chat: Chat, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        self._chat = chat
        self._turns: list[Turn] = []
        self._tools = tools
        self._messages = chat.without_markup(messages)
        self._replies: dict[int, None] = {}  # the indices of those that the model wrote
        self._render()

    def add(self, turn: Turn, messages: Sequence[Message]) -> None:
        self._turns.append(turn)
        self._replies[len(self._messages)] = None
        self._messages.append(self._chat.reply_message(turn.reply, self._tools))
        self._messages += self._chat.without_markup(messages)
        self._render()

    def _render(self) -> None:
        self.prompt_ids = self._chat.rendered_ids(self._messages, self._tools, self._replies)
        self.parent, self.new_ids = place_call(self._turns, self.prompt_ids)


HISTORIES: dict[str, type[AppendedHistory] | type[RerenderedHistory]] = {
    "append": AppendedHistory,
    "rerender": RerenderedHistory,
}
