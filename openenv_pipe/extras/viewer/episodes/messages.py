"""The conversation of a recorded episode as chat messages, for data sets."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from openenv_pipe.config.schema import RunConfig, TextAdapterConfig
from openenv_pipe.environments.adapters.templates import compact_json
from openenv_pipe.environments.adapters.text import TextAdapter
from openenv_pipe.errors import ConfigError
from openenv_pipe.types import Episode, Message, Observation, Turn, TurnRole

Result = TypeVar("Result")
# A message, and the turn whose reply it is; None: the agent did not write it there.
Shown = tuple[dict[str, str], Turn | None]
Messages = list[Shown]


def messages_reader(config: RunConfig) -> Callable[[Episode], Messages]:
    """Return the function from an episode to its messages, which end with the last reply.

    Where messages were recorded, as for hosted models and judged episodes, they are these. Those of
    `env.adapter.type=text` are rendered again from the observations, as they were in the run.
    Otherwise observations are the user's messages, as JSON.
    """
    adapters = {
        name: TextAdapter(each.env.adapter)
        for name, each in config.environments.items()
        if isinstance(each.env.adapter, TextAdapterConfig)
    }

    def read(episode: Episode) -> Messages:
        adapter = adapters.get(episode.task.env)
        if any(turn.messages for turn in episode.turns):
            return _recorded(episode)
        try:
            found = _rendered(adapter, episode) if adapter else _observed(episode)
        except ConfigError:  # a template that does not fit the observations any more
            found = _observed(episode)
        while found and found[-1][0]["role"] != "assistant":
            found.pop()
        return found

    return read


def _recorded(episode: Episode) -> Messages:
    found: Messages = []
    for turn in episode.agent_turns:
        found += [_plain(message) for message in turn.messages]
        found.append(_reply(turn))
    return found


def _rendered(adapter: TextAdapter, episode: Episode) -> Messages:
    """Render the messages as `rollout/episode.py` does while it plays. Raises ConfigError."""
    opening = _finished(adapter.open(episode.first_observation, _ask))
    found = [_plain(message) for message in opening.messages]
    for turn in episode.turns:
        found.append(_reply(turn))
        for step in turn.steps:
            found += [_plain(message) for message in adapter.follow(step.observation)]
        if turn.unusable is not None:
            found += [_plain(message) for message in adapter.reject(turn.unusable)]
    return found


def _observed(episode: Episode) -> Messages:
    found = [_user(compact_json(episode.first_observation))]
    for turn in episode.turns:
        found.append(_reply(turn))
        found += [_user(compact_json(step.observation)) for step in turn.steps]
        if turn.unusable is not None:
            found.append(_user(turn.unusable))
    return found


def _plain(message: Message) -> Shown:
    return {str(key): str(value) for key, value in message.items() if key != "images"}, None


def _reply(turn: Turn) -> Shown:
    is_agents = turn.role is TurnRole.AGENT
    return {"role": "assistant", "content": turn.reply}, turn if is_agents else None


def _user(text: str) -> Shown:
    return {"role": "user", "content": text}, None


async def _ask(action: Any) -> Observation:
    raise ConfigError("there is no environment to ask")


def _finished(work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise ConfigError("the adapter needs the environment")
