"""The model calls of one program: from chat requests to completions of the engine."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openenv_pipe.engines.base import Completion, TokenRequest, turn_seed
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.agents.http.chat_completions import (
    ChatRequest,
    InvalidRequestError,
    completion_body,
    ignored_settings,
    read_request,
    reply_message,
)
from openenv_pipe.extras.agents.http.request_fields import IGNORED
from openenv_pipe.extras.agents.known_replies import KnownReplies
from openenv_pipe.extras.agents.schema import CallingAgentConfig
from openenv_pipe.rollout.context import Chat, EpisodeSpec, PlayContext
from openenv_pipe.system.untrusted_text import shortened
from openenv_pipe.types import CUT_BY_REQUEST, Finish, Message, Usage

MODEL = "policy"  # the name of the model for programs
MAX_NOTE_LENGTH = 120  # characters of what a request asked for
BROKEN_UP = (
    "words of the chat format, such as <tool_call>, were broken up in the messages that were sent; "
    "send calls as tool_calls"
)


class RejectedCallError(Exception):
    """A model call that gets no answer. The text goes to its caller."""


class TooLongError(RejectedCallError):
    """A prompt that leaves no room for a reply. The program gets a final message instead."""


class EndedError(RejectedCallError):
    """The episode is over, or the engine has failed."""


@dataclass(slots=True)
class Connection:
    is_answered: bool = False  # the whole answer was sent
    is_lost: bool = False  # the program left before that


@dataclass(kw_only=True, slots=True)
class Call:
    """One answered call of the model. For a hosted model, the ids are numbers of messages."""

    number: int
    request: ChatRequest
    messages: list[Message]  # with the raw text of the model's own
    prompt_ids: list[int]
    completion: Completion
    reply: str
    times_s: list[float]  # Unix times: when it was asked for, and answered
    connection: Connection
    usage: Usage | None = None  # of a hosted model: tokens of the whole prompt and of the reply


@dataclass(kw_only=True, slots=True)
class WaitingCall:
    request: ChatRequest
    connection: Connection
    answer: asyncio.Future[dict[str, Any]]
    asked_s: float

    @property
    def order(self) -> str:
        """The sort key of calls made at once: nothing in it differs between equal programs."""
        request = self.request
        return json.dumps(
            [request.messages, request.tools, request.max_tokens, request.takes_calls],
            sort_keys=True,
        )


@dataclass(kw_only=True, slots=True)
class _Prepared:
    number: int
    waiting: WaitingCall
    messages: list[Message]
    prompt_ids: list[int]
    max_tokens: int
    has_own_limit: bool  # the request allows fewer tokens than the run does


class ModelCalls:
    """Answers the calls of one episode's program, and keeps them.

    Calls that the program makes at once are sampled together. An exact engine samples them in
    rounds. A round begins when the program does nothing but wait for answers, and its calls are
    sorted by their text, so that equal programs give equal rounds. Other engines answer calls as
    they come.
    """

    def __init__(self, context: PlayContext, spec: EpisodeSpec, config: CallingAgentConfig) -> None:
        self.answered: list[Call] = []
        self.notes: list[str] = []
        self.rejections: list[str] = []  # of calls without an answer: the status and the reason
        self.is_too_long = False  # a prompt had no room
        self.failure: Exception | None = None  # what ends the run
        # Waits until the program does nothing but wait, if the system can tell.
        self.settle: Callable[[], Awaitable[None]] | None = None
        self._context = context
        self._spec = spec
        self._config = config
        self._known = KnownReplies()
        self._num_begun = 0
        self._num_sampled = 0  # tokens, of the first completion of each round
        self._num_waiting = 0  # calls that wait for the engine
        self._waiting_since_s = 0.0  # by the monotonic clock
        self._waited_s = 0.0
        self._num_tokens = 0
        self._waiting: list[WaitingCall] = []  # for the next round
        self._in_rounds = False
        self._running: set[asyncio.Task[None]] = set()
        self._has_ended = False
        self._has_rounds = context.engine.capabilities.is_exact

    @property
    def waited_s(self) -> float:
        waits = self._num_waiting > 0
        return self._waited_s + (time.monotonic() - self._waiting_since_s if waits else 0.0)

    @property
    def _chat(self) -> Chat:
        assert self._context.chat is not None
        return self._context.chat

    async def complete(self, body: Mapping[str, Any], connection: Connection) -> dict[str, Any]:
        """Answer a request for a chat completion.

        A call that the engine has begun is finished and kept even if the caller is cancelled.

        Raises RejectedCallError: there is no answer.
        """
        try:
            request = read_request(body)
        except InvalidRequestError as error:
            raise RejectedCallError(str(error)) from None
        self._take_notes(body)
        answer = asyncio.get_running_loop().create_future()
        waiting = WaitingCall(
            request=request, connection=connection, answer=answer, asked_s=time.time()
        )
        if not self._num_waiting:
            self._waiting_since_s = time.monotonic()
        self._num_waiting += 1
        if not self._has_rounds:
            self._start(self._answer([waiting]))
        else:
            self._waiting.append(waiting)
            if not self._in_rounds:
                self._in_rounds = True
                self._start(self._answer_in_rounds())
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            connection.is_lost = True
            raise

    async def end(self) -> None:
        """Answer no further call, and wait for those that the engine has begun."""
        self._has_ended = True
        if self._running:
            await asyncio.wait(self._running)

    def cancel(self) -> None:
        """Drop the calls that wait for the engine, because the rollout batch ends."""
        for answering in self._running:
            answering.cancel()

    def _start(self, answering: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(answering)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer_in_rounds(self) -> None:
        try:
            while self._waiting:
                if self.settle is not None:
                    await self.settle()
                calls, self._waiting = self._waiting, []
                if len(calls) > 1:
                    calls.sort(key=lambda call: call.order)
                await self._answer(calls)
        finally:
            self._in_rounds = False
            calls, self._waiting = self._waiting, []
            self._end(calls)

    async def _answer(self, calls: Sequence[WaitingCall]) -> None:
        try:
            prepared = [each for call in calls if (each := self._prepare(call)) is not None]
            completions = await self._generate(prepared)
            for each, completion in zip(prepared, completions, strict=True):
                each.waiting.answer.set_result(self._finish(each, completion))
        except Exception as error:  # of the engine, or a bug: `AgentPlayer` raises it again
            self.failure = error
        finally:
            self._end(calls)

    def _end(self, calls: Sequence[WaitingCall]) -> None:
        self._num_waiting -= len(calls)
        if calls and not self._num_waiting:
            self._waited_s += time.monotonic() - self._waiting_since_s
        for call in calls:
            if not call.answer.done():
                call.answer.set_exception(EndedError("the episode is over"))

    def _reject_after_end(self, waiting: WaitingCall) -> None:
        if self._has_ended or self.failure is not None or waiting.connection.is_lost:
            raise EndedError("the episode is over")

    def _prepare(self, waiting: WaitingCall) -> _Prepared | None:
        """Make the prompt of a call; None if it is rejected."""
        try:
            self._reject_after_end(waiting)
            request = waiting.request
            messages, known_ids = self._restored(request)
            prompt_ids = self._chat.rendered_ids(messages, request.tools, known_ids)
            limit = self._room(len(prompt_ids))
        except (RejectedCallError, ConfigError) as error:  # ConfigError: of the template
            is_rejected = isinstance(error, RejectedCallError)
            rejection = error if is_rejected else RejectedCallError(str(error))
            waiting.answer.set_exception(rejection)
            return None
        max_tokens = min(limit, request.max_tokens or limit)
        self._num_tokens += len(prompt_ids) + max_tokens  # until the reply is there
        number = self._num_begun
        self._num_begun += 1
        return _Prepared(
            number=number,
            waiting=waiting,
            messages=messages,
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            has_own_limit=max_tokens < limit,
        )

    def _finish(self, call: _Prepared, completion: Completion) -> dict[str, Any]:
        request = call.waiting.request
        self._num_tokens -= call.max_tokens - len(completion.token_ids)
        reply = self._chat.reply_text(completion.token_ids)
        read = self._chat.reply_reader.read(reply, request.tools)
        message = reply_message(read, request, call.number)
        is_whole = completion.finish is Finish.STOP
        ids = completion.token_ids[:-1] if is_whole else completion.token_ids
        self._known.add(request.sent, message, reply, ids)
        if not is_whole and call.has_own_limit and call.max_tokens > 1:
            self._note(CUT_BY_REQUEST)
        self.answered.append(
            Call(
                number=call.number,
                request=request,
                messages=call.messages,
                prompt_ids=call.prompt_ids,
                completion=completion,
                reply=reply,
                times_s=[call.waiting.asked_s, time.time()],
                connection=call.waiting.connection,
            )
        )
        return completion_body(
            completion,
            message,
            number=call.number,
            model=MODEL,
            prompt_ids=call.prompt_ids,
            names_tokens=request.names_tokens,
        )

    def _restored(self, request: ChatRequest) -> tuple[list[Message], dict[int, list[int] | None]]:
        """Return the messages for the template, and the sampled ids of the model's own, by index.

        None: the template gets such a message in another form than its text.
        """
        messages, ids = self._chat.without_markup(request.messages), dict[int, list[int] | None]()
        found = self._known.find(request.sent)
        others = [index for index in range(len(messages)) if index not in found.replies]
        if any(
            messages[index]["content"] != request.messages[index]["content"]
            for index in others
            if not request.messages[index].get("calls")
        ):
            self._note(BROKEN_UP)
        for index, reply in found.replies.items():
            messages[index] = self._chat.reply_message(reply.text, request.tools)
            is_text = messages[index]["content"] == reply.text
            ids[index] = list(reply.ids) if is_text else None
        if found.num_unknown:
            self._note("the history that the program sent has replies that the model did not write")
        if found.num_ambiguous:
            self._note("a reply in the history that the program sent may be one of several")
        return messages, ids

    def _room(self, num_prompt_tokens: int) -> int:
        """Return how many tokens a reply may have. Raises TooLongError."""
        env, spent = self._context.env, self._config.max_tokens
        room = env.max_episode_tokens - num_prompt_tokens
        whole = room if spent is None else spent - self._num_tokens - num_prompt_tokens
        if min(room, whole) < env.min_reply_tokens:
            self.is_too_long = True
            limit = (
                f"env.max_episode_tokens={env.max_episode_tokens}"
                if room < env.min_reply_tokens
                else f"agent.max_tokens={spent}"
            )
            raise TooLongError(f"the prompt has {num_prompt_tokens} tokens, too many for {limit}")
        return min(env.max_reply_tokens, room, whole)

    async def _generate(self, calls: Sequence[_Prepared]) -> list[Completion]:
        """Sample the completions of calls, each with random numbers of its own."""
        requests = [
            TokenRequest(
                episode=self._spec.number,
                turn=call.number,
                max_tokens=call.max_tokens,
                temperature=self._spec.temperature,
                seed=turn_seed(self._spec.seed, call.number) if place else self._spec.seed,
                prompt_ids=call.prompt_ids,
                num_concurrent=len(calls),
                num_sampled=0 if place else self._num_sampled,
            )
            for place, call in enumerate(calls)
        ]
        engine = self._context.engine
        completions = await asyncio.gather(*(engine.generate(each) for each in requests))
        self._num_sampled += sum(len(each.token_ids) for each in completions[:1])
        return completions

    def _take_notes(self, body: Mapping[str, Any]) -> None:
        """Note what the program asked for and did not get, once each."""
        found = [
            f"the program asked for {shortened(f'{name}={value!r}', MAX_NOTE_LENGTH)}; it got the "
            f"model's own distribution at temperature={self._spec.temperature:g}"
            for name, value in ignored_settings(body, temperature=self._spec.temperature).items()
        ]
        found += [
            f"the program asked for {shortened(f'{name}={value!r}', MAX_NOTE_LENGTH)}, which has "
            "no effect here"
            for name, value in body.get(IGNORED, {}).items()
        ]
        if (model := body.get("model")) not in (None, "", MODEL):
            found.append(
                f"the program asked for the model {shortened(str(model), MAX_NOTE_LENGTH)!r}; "
                f"{MODEL!r} answered"
            )
        for note in found:
            self._note(note)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
