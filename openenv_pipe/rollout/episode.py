"""One episode, from reset to its end. Ids only grow; nothing is tokenised twice."""

import time
from collections.abc import Sequence
from typing import Protocol

from openenv_pipe.adapters.base import Adapter, UnusableReply
from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.engines.base import Completion, Engine, Request
from openenv_pipe.errors import SessionError, StepRefusedError
from openenv_pipe.hosts.base import Host
from openenv_pipe.session import Session, StepResult
from openenv_pipe.types import Action, Episode, Finish, Message, Status, Turn


class Chat(Protocol):
    """What an episode needs of a chat format."""

    def first_ids(self, messages: Sequence[Message]) -> list[int]: ...
    def following_ids(self, messages: Sequence[Message], *, ended: bool) -> list[int]: ...
    def reply_text(self, completion_ids: Sequence[int]) -> str: ...


class Player:
    """Plays one episode: engine on one side, session on the other, adapter between them."""

    def __init__(
        self,
        episode: Episode,
        number: int,
        *,
        env: EnvConfig,
        host: Host,
        adapter: Adapter,
        chat: Chat,
        engine: Engine,
        temperature: float,
    ) -> None:
        self._episode = episode
        self._number = number
        self._env = env
        self._host = host
        self._adapter = adapter
        self._chat = chat
        self._engine = engine
        self._temperature = temperature

    async def play(self) -> None:
        """Fills the episode in. A session's failure ends it with status ERROR, as data.

        Raises EngineError and HostError: those end the run.
        """
        started = time.perf_counter()
        try:
            async with self._host.session() as session:
                self._episode.status = await self._play(session)
        except SessionError as error:
            self._episode.status = Status.ERROR
            self._episode.error = f"{type(error).__name__}: {error}"
        finally:
            self._episode.duration_s = time.perf_counter() - started

    async def _play(self, session: Session) -> Status:
        episode, env = self._episode, self._env
        keywords = {**episode.task.reset, "seed": episode.task.seed}
        result = await session.reset(keywords, env.reset_timeout_s)
        episode.first_observation = result.observation
        if result.done:
            return Status.DONE
        new_ids = self._chat.first_ids(self._adapter.open(result.observation))
        while True:
            room = env.max_episode_tokens - episode.num_tokens - len(new_ids)
            if room < 1:
                return Status.TOKEN_LIMIT
            turn = await self._reply(new_ids, min(env.max_reply_tokens, room))
            episode.turns.append(turn)
            messages, done = await self._act(session, turn)
            if done:
                return Status.DONE
            if len(episode.turns) == env.max_turns:
                return Status.TURN_LIMIT
            new_ids = self._chat.following_ids(messages, ended=turn.finish is Finish.STOP)

    async def _reply(self, new_ids: list[int], max_tokens: int) -> Turn:
        episode = self._episode
        completion: Completion = await self._engine.generate(
            Request(
                episode=self._number,
                new_ids=new_ids,
                max_tokens=max_tokens,
                temperature=self._temperature,
                seed=episode.seed,
                observations=[
                    episode.first_observation,
                    *(turn.observation for turn in episode.turns if turn.observation),
                ],
            )
        )
        return Turn(
            prompt_ids=new_ids,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finish=completion.finish,
            policy_version=completion.policy_version,
            reply=self._chat.reply_text(completion.token_ids),
        )

    async def _act(self, session: Session, turn: Turn) -> tuple[list[Message], bool]:
        """Sends the reply's action. What cannot be used is told to the model, and costs a turn."""
        try:
            turn.action = self._adapter.read(turn.reply)
            result = await self._step(session, turn.action)
        except UnusableReply as unusable:
            turn.unusable = str(unusable)
            return self._adapter.refuse(turn.unusable), False
        turn.observation = result.observation
        turn.reward = result.reward or 0.0
        return self._adapter.follow(result.observation), result.done

    async def _step(self, session: Session, action: Action) -> StepResult:
        try:
            return await session.step(action, self._env.step_timeout_s)
        except StepRefusedError as error:
            if error.code == "VALIDATION_ERROR":
                raise UnusableReply(str(error)) from None
            raise
