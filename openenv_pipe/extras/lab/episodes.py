"""Play episodes whose actions a function, or chance, chooses; look for complaints in them."""

import random
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from openenv_pipe.commands.recorded_play import PlayedEpisode, RecordedPlayer, UsableReplies, reset
from openenv_pipe.config.schema import EnvConfig, ScriptedEngineConfig
from openenv_pipe.engines.base import ObservationRequest, StaticEngine, TextReply
from openenv_pipe.engines.scripted import ScriptedPolicy, replies_of
from openenv_pipe.environments.adapters import Adapter
from openenv_pipe.environments.adapters.base import Ask
from openenv_pipe.environments.adapters.json import without_metadata
from openenv_pipe.environments.adapters.tool import call_action, tools_of
from openenv_pipe.environments.client.session import LIST_TOOLS, Session, step_aside
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.random_policy import draw_action, draw_call
from openenv_pipe.environments.schemas import Schema
from openenv_pipe.errors import ConfigError, SessionTimeoutError, StepRejectedError
from openenv_pipe.models.replies.reader import PLAIN_READER
from openenv_pipe.system.tasks import awaited
from openenv_pipe.types import Action, Message, Observation, Opening, Task, Tool

ERROR_FIELDS = frozenset({"error", "errors", "error_message", "exception", "traceback"})
MAX_COMPLAINT = 400  # characters
COMPLAINT = re.compile(
    r"not (?:set|found|given|provided|specified|loaded|configured|available|installed)|unavailable"
    r"|\b(?:is|are) (?:required|missing)|\bmissing (?:\w+ ){0,3}(?:keyword|argument|parameter|key)"
    r"|must (?:be (?:set|given|provided|specified)|provide|pass|specify)|please (?:provide|pass|set"
    r"|specify)|no \w+ (?:was )?(?:set|given|provided|specified|loaded|selected|configured)"
    r"|\berror:|\b\w+Error\b|failed to|api[_ ]key",
    re.IGNORECASE,
)
Chooser = Callable[
    [Sequence[Observation], random.Random], Sequence[Action] | Awaitable[Sequence[Action]]
]


def scripted(policy: ScriptedPolicy, adapter: Adapter, opening: Opening) -> Chooser:
    """Make a chooser of a scripted policy, whose replies are read as a model's would be.

    The chooser raises ConfigError for an unusable reply.
    """
    reply, usable = replies_of(policy), UsableReplies(adapter)

    async def choose(observations: Sequence[Observation], draw: random.Random) -> Sequence[Action]:
        written = await reply(observations, draw, opening)
        return await usable.read(PLAIN_READER.read(written, opening.tools))

    return choose


class ChosenActions(StaticEngine):
    """The engine and the adapter of one episode whose actions a function chooses; its replies have
    no text."""

    capabilities = ScriptedEngineConfig.capabilities
    max_episodes = 1

    def __init__(self, choose: Chooser, draw: random.Random) -> None:
        self._choose = choose
        self._draw = draw
        self._actions: Sequence[Action] = ()

    async def generate(self, request: ObservationRequest) -> TextReply:
        self._actions = await awaited(self._choose(request.observations, self._draw))
        return TextReply(text="")

    async def open(self, observation: Observation, ask: Ask) -> Opening:
        return Opening(messages=[])

    def read(self, reply: str) -> Sequence[Action]:
        return self._actions

    def follow(self, observation: Observation) -> list[Message]:
        return []

    def reject(self, why: str) -> list[Message]:
        return []


async def play_to_end(
    session: Session,
    play: PlayedEpisode,
    choose: Chooser,
    env: EnvConfig,
    draw: random.Random,
    *,
    with_states: bool = False,
) -> None:
    """Play an episode to its end, or for env.max_turns turns, and record it in `play`.

    with_states: also request the state before each turn. Raises SessionError; one of a time limit
    names the task.
    """

    async def choose_after_state(
        observations: Sequence[Observation], draw: random.Random
    ) -> Sequence[Action]:
        try:
            play.states.append(await session.state(env.step_timeout_s))
        except StepRejectedError as rejection:
            play.rejections.append(rejection)
        return await awaited(choose(observations, draw))

    chosen = ChosenActions(choose_after_state if with_states else choose, draw)
    try:
        await RecordedPlayer(env, chosen, chosen, play).play_in(session)
    except SessionTimeoutError as error:
        where = f"task {play.task.id}, after {len(play.results)} answers"
        raise SessionTimeoutError(f"{where}: {error}") from error


def is_complaint(first: Observation) -> bool:
    """Return whether a first observation seems to say that something is missing (a heuristic).

    It has an error in a field of that name, or is a short text with the usual words.
    """
    told = [(path.lower().split("."), value) for path, value in leaves(first) if value]
    if any(ERROR_FIELDS.intersection(path) for path, _ in told):
        return True
    text = "\n".join(value for _, value in told if isinstance(value, str))
    return len(text) <= MAX_COMPLAINT and COMPLAINT.search(text) is not None


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values that are not containers, with their paths; items of a list share one."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, f"{path}[]")
    else:
        yield path, value


def calls_tools(schema: Schema) -> bool:
    """Return whether actions are those of an MCP environment: calls of tools, or their listing."""
    parts = [schema, *schema.get("$defs", {}).values()]
    fields = [part.get("properties", {}) for part in parts if isinstance(part, dict)]
    return any("tool_name" in each for each in fields)


def random_actions(schema: Schema, tools: Sequence[Tool]) -> Chooser:
    """Choose one random action per turn for any adapter: a call of a tool if there are tools."""
    own = without_metadata(schema)

    def choose(observations: Sequence[Observation], draw: random.Random) -> Sequence[Action]:
        if tools:
            return [call_action(**draw_call(tools, draw))]
        return [draw_action(own, observations, draw)]

    return choose


async def session_tools(env: EnvConfig, host: Host, task: Task, schema: Schema) -> Sequence[Tool]:
    """Return the tools of an MCP environment; none for any other.

    An action without fields of its own may be that of an MCP environment, so the server is asked.
    """
    has_fields = bool(without_metadata(schema).get("properties"))
    if has_fields and not calls_tools(schema):
        return ()
    async with host.session() as session:
        await reset(session, task, env)
        try:
            return tools_of(await step_aside(session, env.step_timeout_s, LIST_TOOLS))
        except (ConfigError, StepRejectedError):
            if has_fields:
                raise
            return ()
        finally:
            await session.close()
