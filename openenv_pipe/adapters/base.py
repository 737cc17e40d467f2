"""What an adapter is. It holds no state of an episode: one adapter serves all of them at once."""

from typing import Protocol

from openenv_pipe.types import Action, Message, Observation


class UnusableReply(Exception):  # noqa: N818 - data for the model, not an error of the pipeline
    """The reply cannot become an action. The text says why, and goes back to the model."""


class Adapter(Protocol):
    """Four translations. Messages are `{"role": ..., "content": ...}`."""

    def open(self, observation: Observation) -> list[Message]:
        """The conversation's first messages, from what `reset` returned."""

    def read(self, reply: str) -> Action:
        """The action that the reply asks for. Raises UnusableReply."""

    def follow(self, observation: Observation) -> list[Message]:
        """The messages after a step."""

    def refuse(self, why: str) -> list[Message]:
        """The messages after an unusable reply."""
