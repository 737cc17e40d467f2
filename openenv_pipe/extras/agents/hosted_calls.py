"""The model calls of a program whose model is hosted: for evaluation, without token ids."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from openenv_pipe.engines.base import (
    Completion,
    RelayedRequest,
    RelayingEngine,
    TextReply,
    estimate_tokens,
)
from openenv_pipe.errors import RequestRejectedError
from openenv_pipe.extras.agents.calls import MODEL, Call, ModelCalls, RejectedCallError, WaitingCall
from openenv_pipe.extras.agents.http.chat_completions import ChatRequest, answer_body, message_key
from openenv_pipe.models.chat.messages import calls_in_text
from openenv_pipe.rollout.conversation import UNTRAINED_VERSION
from openenv_pipe.rollout.episode import FILTERED
from openenv_pipe.system.untrusted_json import encodable
from openenv_pipe.types import Finish, Usage

REJECTIONS = (400, 413, 422)  # statuses that say that this request is wrong, and not the settings


class HostedCalls(ModelCalls):
    """Answers the calls of one program with an endpoint, which gets their messages and tools.

    Each message has a number in place of token ids, so that calls are linked as they are for an
    engine with token ids: a call continues the longest conversation that it begins with.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._has_rounds = False
        self._numbers: dict[str, int] = {}  # of messages and sets of tools
        self._engine = cast(RelayingEngine, self._context.engine)

    async def _answer(self, calls: Sequence[WaitingCall]) -> None:
        try:
            for call in calls:
                await self._relay(call)
        except Exception as error:  # of the endpoint, or a bug: `AgentPlayer` raises it again
            self.failure = error
        finally:
            self._end(calls)

    async def _relay(self, waiting: WaitingCall) -> None:
        """Give the endpoint's answer to the program. Raises ConfigError and EngineError."""
        request, number = waiting.request, self._num_begun
        num_prompt_tokens = estimate_tokens([*request.sent, *request.tools])
        try:
            self._reject_after_end(waiting)
            limit = self._room(num_prompt_tokens)
            max_tokens = min(limit, request.max_tokens or limit)
            self._num_begun += 1
            self._num_tokens += num_prompt_tokens + max_tokens  # until the reply is there
            reply = await self._ask(request, number, max_tokens)
        except RejectedCallError as error:
            waiting.answer.set_exception(error)
            return
        num_reply_tokens = reply.num_completion_tokens
        if num_reply_tokens is None:
            num_reply_tokens = min(max_tokens, estimate_tokens([reply.message]))
        usage = Usage(
            num_prompt_tokens=reply.num_prompt_tokens or num_prompt_tokens,
            num_completion_tokens=num_reply_tokens,
        )
        self._num_tokens -= max_tokens - num_reply_tokens
        if reply.finish is Finish.FILTERED:
            self._note(FILTERED)
        self._keep(waiting, number, reply, usage)
        waiting.answer.set_result(_body(number, reply, usage))

    async def _ask(self, request: ChatRequest, number: int, max_tokens: int) -> TextReply:
        relayed = RelayedRequest(
            episode=self._spec.number,
            turn=number,
            max_tokens=max_tokens,
            temperature=self._spec.temperature,
            seed=self._spec.seed,
            messages=request.sent,
            tools=request.tools,
        )
        try:
            return await self._engine.relay(relayed)
        except RequestRejectedError as error:
            if error.status not in REJECTIONS:
                raise
            raise RejectedCallError(str(error)) from error

    def _keep(self, waiting: WaitingCall, number: int, reply: TextReply, usage: Usage) -> None:
        request = waiting.request
        tools = [json.dumps(request.tools, sort_keys=True)] if request.tools else []
        texts = [*tools, *map(_text, request.sent)]
        completion = Completion(
            token_ids=self._numbers_of([_text(reply.assistant_message)]),
            logprobs=[],
            finish=reply.finish,
            policy_versions=[UNTRAINED_VERSION],
        )
        self.answered.append(
            Call(
                number=number,
                request=request,
                messages=[calls_in_text(message) for message in request.messages],
                prompt_ids=self._numbers_of(texts),
                completion=completion,
                reply=encodable(reply.text),
                times_s=[waiting.asked_s, time.time()],
                connection=waiting.connection,
                usage=usage,
            )
        )

    def _numbers_of(self, texts: Sequence[str]) -> list[int]:
        return [self._numbers.setdefault(text, len(self._numbers)) for text in texts]


def _text(message: Mapping[str, Any]) -> str:
    """Return what identifies a message: of a reply, the part that programs send back."""
    is_reply = message.get("role") == "assistant"
    return json.dumps(message_key(message) if is_reply else message, sort_keys=True)


def _body(number: int, reply: TextReply, usage: Usage) -> dict[str, Any]:
    ended = "tool_calls" if reply.message.get("tool_calls") else "stop"
    choice = {
        "message": {"role": "assistant", **reply.message},
        "finish_reason": ended if reply.finish is Finish.STOP else str(reply.finish),
    }
    return answer_body(number, MODEL, choice, usage.num_prompt_tokens, usage.num_completion_tokens)
