"""A model that answers anyone's calls, in the same dialects as programs that play episodes get."""

import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from openenv_pipe.engines.base import Engine, TokenRequest
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.agents.calls import Connection, RejectedCallError
from openenv_pipe.extras.agents.http.capture import Session, Upstream, extract_api_key
from openenv_pipe.extras.agents.http.chat_completions import (
    ChatRequest,
    InvalidRequestError,
    completion_body,
    ignored_settings,
    read_request,
    reply_message,
)
from openenv_pipe.extras.agents.http.endpoint import Endpoint, admit_call, listen
from openenv_pipe.extras.agents.http.gate import Admitted, RejectedError, reject_other_sites
from openenv_pipe.extras.agents.http.request_fields import IGNORED
from openenv_pipe.models.chat.messages import calls_in_text
from openenv_pipe.rollout.context import Chat

TEMPERATURE = 1.0  # of requests that name none
MAX_TEMPERATURE = 2.0
MAX_SEED = 2**62 - 1


class ServedModel:
    """Answers requests with an engine that takes token ids, each as an episode of one turn."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        *,
        name: str,
        max_tokens: int,
        notify: Callable[[str], None],
    ) -> None:
        """
        max_tokens: of a prompt and its reply.
        notify: receives a line for each ignored setting.
        """
        self.name = name
        self._engine = engine
        self._chat = chat
        self._max_tokens = max_tokens
        self._notify = notify
        self._told: set[str] = set()
        self._num_calls = 0

    async def complete(self, body: Mapping[str, Any], connection: Connection) -> dict[str, Any]:
        try:
            request = read_request(body)
            prompt_ids = self.prompt_ids(request)
        except (InvalidRequestError, ConfigError) as error:
            raise RejectedCallError(str(error)) from None
        temperature, top_p, seed = _temperature(body), _top_p(body), body.get("seed")
        ignored = ignored_settings(body, temperature=temperature, top_p=top_p)
        named = ignored.keys() | body.get(IGNORED, {}).keys() - {"seed"}
        for name in sorted(named - self._told):
            self._told.add(name)
            self._notify(f"a request asks for {name}, which this server ignores")
        number = self._num_calls
        self._num_calls += 1
        try:
            completion = await self._engine.generate(
                TokenRequest(
                    episode=number,
                    turn=0,
                    max_tokens=self._room(request, len(prompt_ids)),
                    temperature=temperature,
                    top_p=top_p,
                    seed=seed & MAX_SEED if type(seed) is int else secrets.randbits(62),
                    prompt_ids=prompt_ids,
                )
            )
        finally:
            self._engine.end_episode(number)
        reply = self._chat.reply_text(completion.token_ids)
        read = self._chat.reply_reader.read(reply, request.tools)
        answer = completion_body(
            completion,
            reply_message(read, request, number),
            number=number,
            model=self.name,
            prompt_ids=prompt_ids,
            names_tokens=request.names_tokens,
        )
        return {**answer, "created": int(time.time())}

    def prompt_ids(self, request: ChatRequest) -> list[int]:
        """Return the ids of a request's messages. Raises ConfigError.

        Which of the assistant's messages the model wrote is not known. All are taken for its own,
        without special tokens, because its thoughts and calls are markup too.
        """
        messages, replies = self._chat.without_markup(request.messages), dict[int, None]()
        for index, message in enumerate(request.messages):
            if message["role"] == "assistant":
                text = calls_in_text(message)["content"]
                messages[index] = self._chat.reply_message(text, request.tools, is_sampled=False)
                replies[index] = None
        return self._chat.rendered_ids(messages, request.tools, replies)

    def _room(self, request: ChatRequest, num_tokens: int) -> int:
        room = self._max_tokens - num_tokens
        if room < 1:
            raise RejectedCallError(
                f"the messages are {num_tokens} tokens long; the model is served with "
                f"{self._max_tokens} for messages and reply together"
            )
        return min(room, request.max_tokens or room)


class ModelEndpoint(Endpoint):
    def __init__(self, model: ServedModel, *, host: str, port: int, key: str) -> None:
        self._host = host
        self._key = key
        super().__init__(
            listen(host, port),
            model=model.name,
            answers_any_name=False,
            find=lambda _: model,
            admit=self._admit,
            level="text",
            registry=_NoRegistry(),
        )

    def _admit(self, scope: Scope, headers: Headers) -> Admitted:
        reject_other_sites(headers, self._host)
        given = (extract_api_key(headers) or "").encode(errors="replace")
        if not hmac.compare_digest(given, self._key.encode()):
            raise RejectedError(401, "the API key is missing or wrong")
        return admit_call(scope, self._key)


class _NoRegistry:
    """Replaces the proxy's registry: each request is a session that nothing keeps."""

    require_registered = False

    def resolve(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> Session:
        return Session(session_id="", upstream=Upstream(llm_url=""))

    def list_ids(self) -> list[str]:
        return []


def _temperature(body: Mapping[str, Any]) -> float:
    given = _number(body, "temperature", TEMPERATURE)
    if not 0 <= given <= MAX_TEMPERATURE:
        raise RejectedCallError(
            f"temperature is {given!r:.40}; expected at least 0 and at most {MAX_TEMPERATURE:g}"
        )
    return given


def _top_p(body: Mapping[str, Any]) -> float:
    given = _number(body, "top_p", 1.0)
    if not 0 < given <= 1:
        raise RejectedCallError(f"top_p is {given!r:.40}; expected more than 0 and at most 1")
    return given


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    """Return a setting of a request. Raises RejectedCallError if it is not a number."""
    given = body.get(name)
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise RejectedCallError(f"{name} is {given!r:.40}; expected a number")
    return float(given)
