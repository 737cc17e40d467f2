"""Show episodes to a judge: as data, between tags that the data cannot contain.

Whatever a model or an environment wrote is JSON on one line, in which `<` is escaped. So no text
of theirs can end its element or begin another one. The judge is told to follow nothing in it.
"""

import json
from collections.abc import Sequence
from typing import Any

from openenv_pipe.system.untrusted_json import encodable_json
from openenv_pipe.types import Episode, Message, Observation, Status

Conversation = list[dict[str, Any]]


def conversation_of(episode: Episode) -> Conversation:
    """Return what the agent read and wrote, and what the environment showed after that.

    A reply that the agent was shown and did not write there, such as an example, has the role
    `given reply`. For an episode without turns, the first observation is shown. The reward that a
    program or client reports is left out.
    """
    if not episode.turns:
        return encodable_json([_from_environment(episode.first_observation)])
    shown: Conversation = []
    for turn in episode.agent_turns:
        shown += map(_as_shown, turn.messages)
        shown.append({"role": "assistant", "content": turn.reply})
    return encodable_json(shown + [_from_environment(each) for each in _unread(episode)])


def _unread(episode: Episode) -> list[Observation]:
    """Return the observations after the last reply, which the agent has not read."""
    by_turn = [[step for step in turn.steps if not step.is_report] for turn in episode.turns]
    answered = by_turn[-1]
    if not answered and episode.status is Status.DONE:
        # A program may call the model once more after the end.
        answered = next(filter(None, reversed(by_turn)), [])[-1:]
    return [step.observation for step in answered]


def _from_environment(observation: Observation) -> dict[str, Any]:
    return {"role": "environment", "content": observation}


def _as_shown(message: Message) -> dict[str, Any]:
    """Return a message with notes of its images only, because judges read text."""
    role = "given reply" if message["role"] == "assistant" else message["role"]
    return {name: value for name, value in message.items() if name != "images"} | {"role": role}


def distinct_conversations(episodes: Sequence[Episode]) -> tuple[list[Conversation], list[int]]:
    """Return the conversations that differ, and the index among them of each episode's."""
    conversations: list[Conversation] = []
    index_of: list[int] = []
    for episode in episodes:
        conversation = conversation_of(episode)
        if conversation not in conversations:
            conversations.append(conversation)
        index_of.append(conversations.index(conversation))
    return conversations, index_of


def shared_beginning(conversations: Sequence[Conversation]) -> int:
    count = 0
    for messages in zip(*conversations, strict=False):
        if any(message != messages[0] for message in messages):
            break
        count += 1
    return count


def quoted(tag: str, value: Any, **attributes: object) -> str:
    """Return an element with the value as JSON, which cannot contain a tag."""
    names = "".join(f' {name}="{number}"' for name, number in attributes.items())
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return f"<{tag}{names}>\n{data}\n</{tag}>"
