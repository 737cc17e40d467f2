"""Play episodes without a model, to try environments.

This is never used for training: replies are not tokenized, and token limits do not apply. As in
training, an action that is the player's mistake costs a turn, and one that raises on the server
ends the episode as a failed one, unless env.step_exception=unusable.
"""

import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.engines.scripted import ScriptedPolicy, replies_of
from openenv_pipe.environments.adapters import Adapter, UnusableReply
from openenv_pipe.environments.client.protocol import StepResult, is_mistake
from openenv_pipe.environments.client.session import Session
from openenv_pipe.errors import ConfigError, StepRefusedError
from openenv_pipe.models.reply_reader import PLAIN_READER
from openenv_pipe.system.tasks import awaited
from openenv_pipe.types import Action, Observation, Opening, Task

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


@dataclass(kw_only=True, slots=True)
class PlayedEpisode:
    """One episode: the answers to the reset and to each action that was not refused."""

    task: Task
    results: list[StepResult] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)  # without refused ones
    refusals: list[StepRefusedError] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)  # one per result
    states: list[dict[str, Any]] = field(default_factory=list)  # before the end, if requested
    failure: StepRefusedError | None = None  # the refusal that ended the episode; in `refusals` too

    @property
    def observations(self) -> list[Observation]:
        return [result.observation for result in self.results]

    @property
    def reward(self) -> float:
        return sum(result.reward or 0.0 for result in self.results)

    @property
    def num_turns(self) -> int:
        """The number of actions that the server was asked to take."""
        return len(self.actions) + len(self.refusals)

    @property
    def done(self) -> bool:
        return self.results[-1].done

    @property
    def is_over(self) -> bool:
        """True if no further step may be taken: the episode is done, or has failed."""
        return self.done or self.failure is not None

    @property
    def comparable(self) -> list[tuple[Any, ...]]:
        """The answers without what may differ between two episodes of the same task."""
        return [comparable(result) for result in self.results]


def comparable(result: StepResult) -> tuple[Any, ...]:
    """Return an answer without its metadata, which may contain times and ids."""
    seen = {key: value for key, value in result.observation.items() if key != "metadata"}
    return seen, result.reward, result.done


def scripted(policy: ScriptedPolicy, adapter: Adapter, opening: Opening) -> Chooser:
    """Make a chooser of a scripted policy, whose replies are read as a model's would be.

    The chooser raises ConfigError for an unusable reply.
    """
    reply = replies_of(policy)

    async def choose(observations: Sequence[Observation], draw: random.Random) -> Sequence[Action]:
        try:
            written = await reply(observations, draw, opening)
            return await awaited(adapter.read(PLAIN_READER.read(written, opening.tools)))
        except UnusableReply as unusable:
            raise ConfigError(f"the scripted policy's reply is unusable: {unusable}") from None

    return choose


async def start_episode(session: Session, task: Task, env: EnvConfig) -> PlayedEpisode:
    """Reset the session to a task, as training does. Raises SessionError."""
    play = PlayedEpisode(task=task)
    started_s = time.perf_counter()
    keywords = {**task.reset, "seed": task.seed}
    play.results.append(await session.reset(keywords, env.reset_timeout_s))
    play.durations_s.append(time.perf_counter() - started_s)
    return play


async def play_to_end(
    session: Session,
    play: PlayedEpisode,
    choose: Chooser,
    env: EnvConfig,
    draw: random.Random,
    *,
    with_states: bool = False,
) -> None:
    """Play an episode to its end, or for env.max_turns turns. Raises SessionError.

    with_states: also request the state before each turn.
    """
    for _ in range(env.max_turns):
        if play.is_over:
            return
        if with_states:
            await _keep_state(session, play, env)
        actions = await awaited(choose(play.observations, draw))
        if not actions:
            return
        for action in actions:
            await take_step(session, play, action, env)
            if play.is_over:
                return


async def take_step(session: Session, play: PlayedEpisode, action: Action, env: EnvConfig) -> None:
    """Take one step, which is answered or refused. Raises SessionError."""
    started_s = time.perf_counter()
    try:
        result = await session.step(action, env.step_timeout_s)
    except StepRefusedError as refusal:
        play.refusals.append(refusal)
        if not is_mistake(refusal, env):
            play.failure = refusal
        return
    play.durations_s.append(time.perf_counter() - started_s)
    play.actions.append(action)
    play.results.append(result)


async def _keep_state(session: Session, play: PlayedEpisode, env: EnvConfig) -> None:
    try:
        play.states.append(await session.state(env.step_timeout_s))
    except StepRefusedError as refusal:
        play.refusals.append(refusal)


def is_complaint(first: Observation) -> bool:
    """True if a first observation seems to say that something is missing (a heuristic).

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
