"""The conversation of a recorded episode as chat messages, for data sets."""

import json

from openenv_pipe.models.chat.messages import split_tools
from openenv_pipe.types import Episode, Message, Tool, Turn

# A message, and the turn whose reply it is; None: the agent did not write it there.
Shown = tuple[dict[str, str], Turn | None]
Messages = list[Shown]


def messages_of(episode: Episode) -> Messages:
    """Return what the model was shown and wrote, without the tools; it ends with the last reply."""
    found: Messages = []
    for turn in episode.agent_turns:
        found += [(_plain(each), None) for each in split_tools(turn.messages)[1]]
        found.append(({"role": "assistant", "content": turn.reply}, turn))
    return found


def tools_of(episode: Episode) -> list[Tool]:
    return split_tools(episode.turns[0].messages)[0] if episode.turns else []


def _plain(message: Message) -> dict[str, str]:
    """Return a message whose values are texts, which tables need, without its images."""
    values = {str(key): value for key, value in message.items() if key != "images"}
    return {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()
    }
