"""The model calls of one program: from chat requests to completions of the engine, and to turns."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openenv_pipe.algorithms.prefix_tree import common_prefix
from openenv_pipe.config.schema import CallingAgentConfig
from openenv_pipe.engines.base import Completion, TokenRequest
from openenv_pipe.errors import ConfigError
from openenv_pipe.rollout.agents.chat_completions import (
    ChatRequest,
    InvalidRequestError,
    KnownReplies,
    completion_body,
    ignored_settings,
    read_request,
    reply_message,
)
from openenv_pipe.rollout.context import RolloutContext
from openenv_pipe.system.foreign_text import shortened
from openenv_pipe.types import Episode, Finish, Message

MODEL = "policy"  # the name of the model for programs
MAX_NOTE_LENGTH = 120  # characters of what a request asked for


class RefusedCallError(Exception):
    """A model call without an answer. The text goes to the program."""


class TooLongError(RefusedCallError):
    """A prompt for which there is no room. The program gets a final message."""


class EndedError(RefusedCallError):
    """The episode is over, or the engine has failed."""


@dataclass(slots=True)
class Connection:
    """The HTTP request that a call comes with."""

    is_answered: bool = False  # the whole answer was sent
    is_lost: bool = False  # the program left before


@dataclass(kw_only=True, slots=True)
class Call:
    """One answered call of the model."""

    number: int
    request: ChatRequest
    messages: list[Message]  # with the raw text of the model's own
    prompt_ids: list[int]
    completion: Completion
    reply: str
    times_s: list[float]  # Unix times: when it was asked for, and answered
    connection: Connection


class ModelCalls:
    """Answers the calls of one episode's program, one after the other, and keeps them.

    The engine has one conversation for each episode, which keeps as much of the last prompt as the
    next one begins with. A call that several parts of a program make at once waits its turn.
    """

    def __init__(
        self,
        context: RolloutContext,
        episode: Episode,
        config: CallingAgentConfig,
        *,
        number: int,
        temperature: float,
    ) -> None:
        """number: identifies the episode to the engine."""
        assert context.chat is not None
        self.answered: list[Call] = []
        self.notes: list[str] = []
        self.num_waiting = 0  # calls that wait for the engine
        self.is_too_long = False  # a prompt had no room
        self.failure: Exception | None = None  # what ends the run
        self._chat = context.chat
        self._context = context
        self._episode = episode
        self._config = config
        self._number = number
        self._temperature = temperature
        self._known = KnownReplies()
        self._one_at_a_time = asyncio.Lock()
        self._kept_ids: list[int] = []  # the engine's conversation
        self._num_begun = 0
        self._num_tokens = 0
        self._running: set[asyncio.Task[dict[str, Any]]] = set()
        self._has_ended = False

    async def complete(self, body: Mapping[str, Any], connection: Connection) -> dict[str, Any]:
        """Answer a request for a chat completion.

        A call that the engine has begun is finished and kept even if the caller is cancelled.

        Raises:
            RefusedCallError: There is no answer.
        """
        try:
            request = read_request(body)
        except InvalidRequestError as error:
            raise RefusedCallError(str(error)) from None
        self._take_notes(body)
        answering = asyncio.create_task(self._answer(request, connection))
        self._running.add(answering)
        answering.add_done_callback(self._forget)
        try:
            return await asyncio.shield(answering)
        except asyncio.CancelledError:
            connection.is_lost = True
            raise

    async def end(self) -> None:
        """Answer no further call, and wait for the one that the engine has begun."""
        self._has_ended = True
        if self._running:
            await asyncio.wait(self._running)

    def cancel(self) -> None:
        """Drop the calls that wait for the engine, because the collection ends."""
        for answering in self._running:
            answering.cancel()

    async def _answer(self, request: ChatRequest, connection: Connection) -> dict[str, Any]:
        self.num_waiting += 1
        try:
            async with self._one_at_a_time:
                return await self._answer_next(request, connection)
        except RefusedCallError:
            raise
        except Exception as error:  # of the engine, or a bug: `AgentPlayer` raises it again
            self.failure = error
            raise EndedError("the engine has failed") from error
        finally:
            self.num_waiting -= 1

    async def _answer_next(self, request: ChatRequest, connection: Connection) -> dict[str, Any]:
        if self._has_ended or self.failure is not None or connection.is_lost:
            raise EndedError("the episode is over")
        asked_s = time.time()
        messages, known_ids = self._restored(request)
        try:
            prompt_ids = self._chat.rendered_ids(messages, request.tools, known_ids)
        except ConfigError as error:  # of the template, for this order of messages
            raise RefusedCallError(str(error)) from None
        limit = self._room(prompt_ids)
        number = self._num_begun
        self._num_begun += 1
        completion = await self._generate(
            prompt_ids, number, min(limit, request.max_tokens or limit)
        )
        reply = self._chat.reply_text(completion.token_ids)
        message = reply_message(reply, request, number)
        is_whole = completion.finish is Finish.STOP
        self._known.add(
            message, reply, completion.token_ids[:-1] if is_whole else completion.token_ids
        )
        self.answered.append(
            Call(
                number=number,
                request=request,
                messages=messages,
                prompt_ids=prompt_ids,
                completion=completion,
                reply=reply,
                times_s=[asked_s, time.time()],
                connection=connection,
            )
        )
        return completion_body(
            completion, message, number=number, model=MODEL, prompt_ids=prompt_ids
        )

    def _restored(self, request: ChatRequest) -> tuple[list[Message], dict[int, list[int]]]:
        """Return the messages for the template, and the ids of replies that it may show as text."""
        messages, ids = self._chat.without_markup(request.messages), dict[int, list[int]]()
        for index, reply in self._known.find(request).items():
            messages[index] = self._chat.reply_message(reply.text)
            if messages[index]["content"] == reply.text:
                ids[index] = reply.ids
        return messages, ids

    def _forget(self, answering: asyncio.Task[dict[str, Any]]) -> None:
        self._running.discard(answering)
        if not answering.cancelled():
            answering.exception()  # Nobody may be left who waits for it.

    def _room(self, prompt_ids: list[int]) -> int:
        """Return the tokens that a reply may have. Raises TooLongError."""
        env, spent = self._context.env, self._config.max_tokens
        room = env.max_episode_tokens - len(prompt_ids)
        whole = room if spent is None else spent - self._num_tokens - len(prompt_ids)
        if min(room, whole) < 1:
            self.is_too_long = True
            limit = (
                f"env.max_episode_tokens={env.max_episode_tokens}"
                if room < 1
                else f"agent.max_tokens={spent}"
            )
            raise TooLongError(f"the prompt has {len(prompt_ids)} tokens, too many for {limit}")
        return min(env.max_reply_tokens, room, whole)

    async def _generate(self, prompt_ids: list[int], number: int, max_tokens: int) -> Completion:
        num_kept = common_prefix(self._kept_ids, prompt_ids[:-1])
        completion: Completion = await self._context.engine.generate(
            TokenRequest(
                episode=self._number,
                turn=number,
                max_tokens=max_tokens,
                temperature=self._temperature,
                seed=self._episode.seed,
                new_ids=prompt_ids[num_kept:],
                num_kept=num_kept,
            )
        )
        self._kept_ids = prompt_ids + completion.token_ids
        self._num_tokens += len(self._kept_ids)
        return completion

    def _take_notes(self, body: Mapping[str, Any]) -> None:
        """Note what the program asked for and did not get, once each."""
        found = [
            f"the program asked for {shortened(f'{name}={value!r}', MAX_NOTE_LENGTH)}; it got the "
            f"model's own distribution at temperature={self._temperature:g}"
            for name, value in ignored_settings(body, self._temperature).items()
        ]
        if (model := body.get("model")) not in (None, "", MODEL):
            found.append(
                f"the program asked for the model {shortened(str(model), MAX_NOTE_LENGTH)!r}; "
                f"{MODEL!r} answered"
            )
        self.notes += [note for note in found if note not in self.notes]
