"""Play one episode, from reset to its end. Token ids are appended, never tokenised again."""

import time
from functools import partial

from openenv_pipe.environments.adapters.base import UnusableReply
from openenv_pipe.environments.client.protocol import StepResult, is_mistake
from openenv_pipe.environments.client.session import Session, step_aside
from openenv_pipe.errors import ConfigError, SessionError, StepRefusedError
from openenv_pipe.models.reply_reader import ReplyReader
from openenv_pipe.rollout.context import PlayContext
from openenv_pipe.rollout.conversation import CONVERSATIONS, Conversation
from openenv_pipe.system.tasks import awaited
from openenv_pipe.types import (
    Action,
    Episode,
    Group,
    Message,
    Opening,
    Status,
    Step,
    Turn,
)


class Player:
    """Plays one episode: engine on one side, session on the other, adapter between them."""

    def __init__(
        self,
        context: PlayContext,
        group: Group,
        episode: Episode,
        *,
        number: int,
        temperature: float,
    ) -> None:
        """number: identifies the episode to the engine."""
        self.number = number
        self.group = group
        self.opening: Opening | None = None  # of the conversation, after the reset
        self._context = context
        self._episode = episode
        self._temperature = temperature

    async def play(self) -> None:
        """Play the episode and fill it in. A session's failure ends it with the status ERROR.

        Raises:
            EngineError, HostError, ConfigError: these end the run.
        """
        started = time.perf_counter()
        self._episode.started_s = time.time()
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
        if result.done:
            return Status.DONE
        ask = partial(step_aside, session, env.step_timeout_s)
        self.opening = await self._context.adapter.open(result.observation, ask)
        conversation = self._conversation(self.opening)
        while True:
            room = env.max_episode_tokens - conversation.num_prompt_tokens
            if room < 1:
                return Status.TOKEN_LIMIT
            asked_s = time.time()
            turn = await conversation.reply(min(env.max_reply_tokens, room))
            turn.times_s = [asked_s, time.time()]
            episode.turns.append(turn)
            messages, end = await self._act(session, turn, conversation.reader)
            if end is not None:
                return end
            if len(episode.turns) == env.max_turns:
                return Status.TURN_LIMIT
            conversation.add(messages)

    def _conversation(self, opening: Opening) -> Conversation:
        """Begin the conversation. Raises ConfigError if the tools alone exceed an episode."""
        context = self._context
        conversation = CONVERSATIONS[context.engine.capabilities.takes](
            context,
            self.group,
            self._episode,
            opening,
            number=self.number,
            temperature=self._temperature,
        )
        limit = context.env.max_episode_tokens
        if conversation.num_prompt_tokens < limit or not opening.tools:
            return conversation
        if (num_for_tools := conversation.num_tool_tokens()) >= limit:
            raise ConfigError(
                f"the descriptions of {len(opening.tools)} tools take {num_for_tools} tokens, and "
                f"env.max_episode_tokens={limit}; raise it above that, as far as the model goes"
            )
        return conversation

    async def _act(
        self, session: Session, turn: Turn, reader: ReplyReader
    ) -> tuple[list[Message], Status | None]:
        """Take the steps of a reply; return the messages that follow, and the status at the end.

        An unusable reply takes a turn too; the messages tell the model why it was unusable.
        """
        adapter, messages = self._context.adapter, list[Message]()
        assert self.opening is not None
        try:
            reply = reader.read(turn.reply, self.opening.tools)
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
        except UnusableReply as refused:  # The calls behind it are not made.
            turn.unusable = "; ".join(filter(None, (str(refused), turn.unusable)))
        if turn.unusable is not None:
            messages += await awaited(adapter.refuse(turn.unusable))
        return messages, Status.ANSWERED if is_answer else None

    async def _step(self, session: Session, action: Action) -> StepResult:
        env = self._context.env
        try:
            return await session.step(action, env.step_timeout_s)
        except StepRefusedError as error:
            if is_mistake(error, env):
                raise UnusableReply(str(error)) from None
            raise
