"""The interface of adapters. An adapter is stateless: one serves all episodes at once."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from openenv_pipe.types import Action, Message, Observation, Opening

STILL_THINKING = "the reply ends inside a thought; end the thought, and then answer"

Ask = Callable[[Action], Awaitable[Observation]]


class UnusableReply(Exception):  # noqa: N818 - data for the model, not an error of the pipeline
    """The reply, or a part of it, cannot become an action. The text tells the model why."""

    def __init__(self, why: str, actions: Sequence[Action] = ()) -> None:
        """actions: of the usable parts, which are taken before the model is told."""
        super().__init__(why)
        self.actions = actions


class Adapter(Protocol):
    """Translates between an environment and a chat model.

    A message is `{"role": ..., "content": ...}`. Any method may be a coroutine function.
    """

    async def open(self, observation: Observation, ask: Ask) -> Opening:
        """Return the first messages of an episode, made of `reset`'s observation.

        `ask` takes a step that is not the model's and returns its observation, from which the
        adapter learns about the episode, such as its tools. It raises SessionError.
        """

    def read(self, reply: str) -> Sequence[Action] | Awaitable[Sequence[Action]]:
        """Return the actions in the reply, in order; an empty sequence ends the episode.

        reply: the text as the model wrote it. In episodes it is a
            `models.replies.reply.Reply`, which knows its thoughts and calls.

        Raises UnusableReply: The reply, or a part of it, is not an action.
        """

    def follow(self, observation: Observation) -> list[Message] | Awaitable[list[Message]]:
        """Return the messages that follow a step."""

    def reject(self, why: str) -> list[Message] | Awaitable[list[Message]]:
        """Return the messages that follow an unusable reply."""
