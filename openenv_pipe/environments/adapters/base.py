"""What an adapter is. It holds no state of an episode: one adapter serves all of them at once."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from openenv_pipe.types import Action, Message, Observation, Opening

Ask = Callable[[Action], Awaitable[Observation]]


class UnusableReply(Exception):  # noqa: N818 - data for the model, not an error of the pipeline
    """The reply cannot become an action. The text says why, and goes back to the model."""


class Adapter(Protocol):
    """Four translations. Messages are `{"role": ..., "content": ...}`."""

    async def open(self, observation: Observation, ask: Ask) -> Opening:
        """The conversation's beginning, from what `reset` returned.

        `ask` takes a step that is not the model's and returns its observation: for what has to
        be known of this episode first, such as its tools. It raises SessionError.
        """

    def read(self, reply: str) -> Sequence[Action]:
        """The actions that the reply asks for, in their order; none ends the episode.

        Raises UnusableReply.
        """

    def follow(self, observation: Observation) -> list[Message]:
        """The messages after a step."""

    def refuse(self, why: str) -> list[Message]:
        """The messages after an unusable reply."""
