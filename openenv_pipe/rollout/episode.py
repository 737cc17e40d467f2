"""The episode loop, from the reset to the end, between an engine and a session.

Training, evaluations, `env check` and `env play` all play by it; they differ in their engines.
"""

import hashlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pydantic import JsonValue

from openenv_pipe.config.schema import POLICY, EnvConfig, RunConfig
from openenv_pipe.engines.base import Engine
from openenv_pipe.environments.adapters import adapter_for
from openenv_pipe.environments.adapters.base import Adapter, UnusableReply
from openenv_pipe.environments.client.protocol import StepResult, is_mistake
from openenv_pipe.environments.client.session import EpisodeSession, step_aside
from openenv_pipe.environments.hosts.base import Host, SessionLender
from openenv_pipe.environments.tasks import Splits, open_splits
from openenv_pipe.environments.tasks.splits import KnownSets
from openenv_pipe.errors import ConfigError, SessionError, StepRejectedError
from openenv_pipe.models.replies.reader import ReplyReader
from openenv_pipe.rollout.context import PLAYER, Chat, EpisodeSpec, PlayContext
from openenv_pipe.rollout.conversation import Conversation, conversation_class
from openenv_pipe.rollout.game import Game
from openenv_pipe.system.tasks import awaited
from openenv_pipe.types import (
    Action,
    Episode,
    Finish,
    Message,
    Observation,
    Opening,
    Status,
    Step,
    Turn,
)

FILTERED = "the provider's content filter withheld the reply, or the rest of it"


@asynccontextmanager
async def own_loop(
    config: RunConfig, loop: "LocalRunner", logs: Path, notify: Callable[[str], None]
) -> AsyncIterator[None]:
    """Give no other player, as `agent=loop` says.

    The `build` of an agent's type is called with the run's configuration, the loop with its
    sessions, the folder for logs and a function that shows a note. It gives an `EpisodeRunner`, or
    None, in an asynchronous context manager.
    """
    yield


class LocalRunner:
    """Plays episodes by the loop below, in sessions of a host. It is an `EpisodeRunner`."""

    def __init__(self, host: Host, adapter: Adapter) -> None:
        self.host = host
        self.adapter = adapter

    @property
    def capacity(self) -> int:
        return self.host.capacity

    @property
    def num_deaths(self) -> int:
        return self.host.num_deaths

    def facts(self) -> dict[str, JsonValue]:
        return self.host.facts()

    async def play(self, context: PlayContext, spec: EpisodeSpec) -> Episode:
        """See `EpisodeRunner.play`."""
        if not spec.roles or context.env.players is None:
            return await Player(context, self.adapter, spec).play(self.host)
        game = Game(context.env, context.env.players)
        plays = {name: self._player(context, spec, name).play for name in spec.roles}
        episodes = await game.play(self.host, spec.task, plays)
        num_moving = sum(bool(episode.turns) for episode in episodes)
        for episode in episodes:
            episode.after_a_move = num_moving > bool(episode.turns)
        of_roles = zip(episodes, spec.roles.values(), strict=True)
        first, *others = [episode for episode, role in of_roles if role == POLICY]
        first.others = others
        return first

    def _player(self, context: PlayContext, spec: EpisodeSpec, name: str) -> "Player":
        role, task = spec.roles[name], spec.task
        spec = replace(
            spec,
            task=replace(task, labels={**task.labels, PLAYER: name}),
            seed=player_seed(spec.seed, name),
            group_seed=player_seed(spec.group_seed, name),
        )
        if not isinstance(role, str):
            is_model = role.capabilities.takes == "token_ids"
            limits = {} if is_model else {"max_episode_tokens": sys.maxsize}
            context = _OpponentContext(
                env=context.env.model_copy(update=limits),
                engine=role,
                chat=context.chat if is_model else None,
            )
        return Player(context, self.adapter, spec)


def player_seed(seed: int, player: str) -> int:
    """Return a seed below 2**62 for one player of a game."""
    digest = hashlib.sha256(f"{seed}/{player}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpponentContext:
    """The `PlayContext` of a player with an engine of its own, from which nothing is learned."""

    env: EnvConfig
    engine: Engine
    chat: Chat | None


class LocalLoop(LocalRunner):
    """The loop with the servers of a host, which it starts and closes. It is an `EpisodeLoop`."""

    def __init__(self, config: RunConfig, host: Host) -> None:
        """The adapter is built by `start`, because it may depend on the servers."""
        self.host = host
        self._config = config

    async def start(self) -> None:
        await self.host.start()
        adapter, host = self._config.env.adapter, self.host
        self.adapter = await adapter_for(adapter, host.urls, host.access)

    async def prepare(self, chat: Chat | None) -> None:
        """Do nothing: each episode gets the chat format from its context."""

    async def open_splits(self, known: KnownSets) -> Splits:
        url = next(iter(self.host.urls), "")  # host=none has no server
        return await open_splits(self._config, known, url, self.host.access)

    async def close(self) -> None:
        await self.host.close()


class Player:
    """Plays one episode: engine on one side, session on the other, adapter between them.

    It alone makes the episode, and hands it over at its end.
    """

    def __init__(self, context: PlayContext, adapter: Adapter, spec: EpisodeSpec) -> None:
        self.opening: Opening | None = None  # of the conversation, after the reset
        self._context = context
        self._adapter = adapter
        self._spec = spec
        self._episode = Episode(task=spec.task, member=spec.member, seed=spec.seed)

    @property
    def episode_so_far(self) -> Episode:
        """A copy of the episode as it is now, for those who watch it."""
        turns = [replace(turn, steps=[*turn.steps]) for turn in self._episode.turns]
        return replace(self._episode, turns=turns)

    async def play(self, host: SessionLender) -> Episode:
        """Play the episode in a session of the host. See `EpisodeRunner.play`."""
        episode, started = self._episode, time.perf_counter()
        episode.started_s = time.time()
        try:
            async with host.session() as session:
                episode.status = await self.play_in(session)
        except SessionError as error:
            episode.status = Status.ERROR
            episode.error = f"{type(error).__name__}: {error}"
        finally:
            episode.duration_s = time.perf_counter() - started
        return episode

    async def play_in(self, session: EpisodeSession) -> Status:
        """Play the episode in this session, and return why it ended. Raises SessionError."""
        episode = self._episode
        result = await self._reset(session)
        episode.first_observation = result.observation
        if result.done:
            return Status.DONE
        ask = partial(step_aside, session, self._context.env.step_timeout_s)
        self.opening = await self._adapter.open(result.observation, ask)
        return await self._converse(session, result, self.opening)

    async def _converse(
        self, session: EpisodeSession, first: StepResult, opening: Opening
    ) -> Status:
        """Play from the opening to the end, and return why it ended."""
        episode, env = self._episode, self._context.env
        conversation = self._conversation(opening, first.observation)
        while True:
            room = env.max_episode_tokens - conversation.num_prompt_tokens
            if room < env.min_reply_tokens:
                return Status.TOKEN_LIMIT
            asked_s = time.time()
            turn = await conversation.reply(min(env.max_reply_tokens, room))
            turn.times_s = [asked_s, time.time()]
            episode.turns.append(turn)
            messages, end = await self._act(session, turn, conversation.reader, opening)
            if end is not None:
                return end
            if len(episode.turns) == env.max_turns:
                return Status.TURN_LIMIT
            conversation.add(messages, [step.observation for step in turn.steps])

    def _conversation(self, opening: Opening, first: Observation) -> Conversation:
        """Begin the conversation. Raises ConfigError if the tools alone exceed an episode."""
        context = self._context
        kind = conversation_class(context)
        conversation = kind(context, self._spec, opening, first)
        limit = context.env.max_episode_tokens
        if conversation.num_prompt_tokens < limit or not opening.tools:
            return conversation
        if (num_for_tools := conversation.num_tool_tokens()) >= limit:
            raise ConfigError(
                f"the descriptions of {len(opening.tools)} tools take {num_for_tools} tokens, and "
                f"env.max_episode_tokens={limit}; raise it above that if the model allows more"
            )
        return conversation

    async def _act(
        self, session: EpisodeSession, turn: Turn, reader: ReplyReader, opening: Opening
    ) -> tuple[list[Message], Status | None]:
        """Take the steps of a reply; return the messages that follow, and the status at the end.

        An unusable reply takes a turn too; the messages tell the model why it was unusable.
        """
        adapter, messages = self._adapter, list[Message]()
        try:
            if turn.finish is Finish.FILTERED:
                raise UnusableReply(FILTERED)
            reply = reader.read(turn.reply, opening.tools)
            actions = await awaited(adapter.read(reply))
        except UnusableReply as unusable:
            actions, turn.unusable = unusable.actions, str(unusable)
        is_answer = not actions and turn.unusable is None
        try:
            for action in actions:
                result = await self._step(session, action)
                reward = result.reward or 0.0
                step = Step(action=action, observation=result.observation, reward=reward)
                turn.steps.append(step)
                turn.times_s.append(time.time())
                if result.done:
                    return [], Status.DONE
                messages += await awaited(adapter.follow(result.observation))
        except UnusableReply as rejected:  # The calls after it are not made.
            turn.unusable = "; ".join(filter(None, (str(rejected), turn.unusable)))
        if turn.unusable is not None:
            messages += await awaited(adapter.reject(turn.unusable))
        return messages, Status.ANSWERED if is_answer else None

    async def _reset(self, session: EpisodeSession) -> StepResult:
        task = self._episode.task
        keywords = {**task.reset, "seed": task.seed}
        return await session.reset(keywords, self._context.env.reset_timeout_s)

    async def _step(self, session: EpisodeSession, action: Action) -> StepResult:
        env = self._context.env
        try:
            return await session.step(action, env.step_timeout_s)
        except StepRejectedError as error:
            if is_mistake(error, env):
                raise UnusableReply(str(error)) from error
            raise
