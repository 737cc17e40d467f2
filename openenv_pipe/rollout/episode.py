"""One episode, from reset to its end. Token ids are only appended, never tokenised again."""

import time
from functools import partial

from openenv_pipe.engines.base import Completion, Request
from openenv_pipe.environments.adapters.base import UnusableReply
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.environments.client.session import Session, step_aside
from openenv_pipe.errors import ConfigError, SessionError, StepRefusedError
from openenv_pipe.rollout.context import RolloutContext
from openenv_pipe.types import (
    Action,
    Episode,
    Finish,
    Group,
    Message,
    Observation,
    Opening,
    Status,
    Step,
    Turn,
)


class Player:
    """Plays one episode: engine on one side, session on the other, adapter between them."""

    def __init__(
        self,
        context: RolloutContext,
        group: Group,
        episode: Episode,
        *,
        number: int,
        temperature: float,
    ) -> None:
        """number: the episode's in the engine's count."""
        self.number = number
        self._context = context
        self._group = group
        self._episode = episode
        self._temperature = temperature
        self._observations: list[Observation] = []
        self._opening: Opening  # from the reset on
        self._num_tokens = 0

    async def play(self) -> None:
        """Play the episode and fill it in. A session's failure ends it with the status ERROR.

        Raises:
            EngineError, HostError, ConfigError: these end the run.
        """
        started = time.perf_counter()
        try:
            async with self._context.host.session() as session:
                self._episode.status = await self._play(session)
        except SessionError as error:
            self._episode.status = Status.ERROR
            self._episode.error = f"{type(error).__name__}: {error}"
        finally:
            self._episode.duration_s = time.perf_counter() - started

    async def _play(self, session: Session) -> Status:
        episode, env = self._episode, self._context.env
        keywords = {**episode.task.reset, "seed": episode.task.seed}
        result = await session.reset(keywords, env.reset_timeout_s)
        episode.first_observation = result.observation
        self._observations.append(result.observation)
        if result.done:
            return Status.DONE
        ask = partial(step_aside, session, env.step_timeout_s)
        self._opening = await self._context.adapter.open(result.observation, ask)
        new_ids = self._first_ids(self._opening)
        while True:
            room = env.max_episode_tokens - self._num_tokens - len(new_ids)
            if room < 1:
                return Status.TOKEN_LIMIT
            turn = await self._reply(new_ids, min(env.max_reply_tokens, room))
            episode.turns.append(turn)
            self._num_tokens += len(turn.prompt_ids) + len(turn.completion_ids)
            messages, end = await self._act(session, turn)
            if end is not None:
                return end
            if len(episode.turns) == env.max_turns:
                return Status.TURN_LIMIT
            new_ids = self._context.chat.following_ids(messages, ended=turn.finish is Finish.STOP)

    async def _reply(self, new_ids: list[int], max_tokens: int) -> Turn:
        episode = self._episode
        completion: Completion = await self._context.engine.generate(
            Request(
                episode=self.number,
                turn=len(episode.turns),
                new_ids=new_ids,
                max_tokens=max_tokens,
                temperature=self._temperature,
                seed=episode.seed,
                observations=self._observations.copy(),
                opening=self._opening,
                group_seed=self._group.seed,
                member=episode.member,
            )
        )
        return Turn(
            prompt_ids=new_ids,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finish=completion.finish,
            policy_versions=completion.policy_versions,
            reply=self._context.chat.reply_text(completion.token_ids),
        )

    def _first_ids(self, opening: Opening) -> list[int]:
        """The first prompt. Raises ConfigError if the tools alone are more than an episode."""
        limit = self._context.env.max_episode_tokens
        ids = self._context.chat.first_ids(opening.messages, opening.tools)
        num_for_tools = 0
        if len(ids) >= limit and opening.tools:
            num_for_tools = len(ids) - len(self._context.chat.first_ids(opening.messages))
        if num_for_tools >= limit:
            raise ConfigError(
                f"the descriptions of {len(opening.tools)} tools take {num_for_tools} tokens, and "
                f"env.max_episode_tokens={limit}; raise it above that, as far as the model goes"
            )
        return ids

    async def _act(self, session: Session, turn: Turn) -> tuple[list[Message], Status | None]:
        """Takes the reply's steps: the messages that follow, and how the episode ended if it did.

        What cannot be used is told to the model, and costs a turn.
        """
        messages: list[Message] = []
        try:
            actions = self._context.adapter.read(turn.reply)
            for action in actions:
                result = await self._step(session, action)
                reward = result.reward or 0.0
                step = Step(action=action, observation=result.observation, reward=reward)
                turn.steps.append(step)
                self._observations.append(result.observation)
                if result.done:
                    return [], Status.DONE
                messages += self._context.adapter.follow(result.observation)
        except UnusableReply as unusable:
            turn.unusable = str(unusable)
            return [*messages, *self._context.adapter.refuse(turn.unusable)], None
        return messages, None if actions else Status.ANSWERED

    async def _step(self, session: Session, action: Action) -> StepResult:
        env = self._context.env
        try:
            return await session.step(action, env.step_timeout_s)
        except StepRefusedError as error:
            is_reply = (
                error.code == "EXECUTION_ERROR" and self._context.env.step_exception == "unusable"
            )
            if is_reply or error.code == "VALIDATION_ERROR":
                raise UnusableReply(str(error)) from None
            raise
