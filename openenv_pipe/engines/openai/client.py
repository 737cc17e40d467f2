"""Chat completions over HTTP, with rate limits, retries and a cache."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openenv_pipe.config.schema import EndpointBlock
from openenv_pipe.errors import EngineError, RequestRejectedError
from openenv_pipe.system.http import MAX_BYTES, HttpClient, bearer
from openenv_pipe.system.http_retries import MAX_QUOTED, TransientError, post, repeated
from openenv_pipe.system.response_cache import ResponseCache
from openenv_pipe.system.untrusted_json import parse_untrusted
from openenv_pipe.system.untrusted_text import quoted

_PATH = "/chat/completions"
_GIVEN_UP = ("error", "abort")  # finish reasons of replies that were not finished
_MAX_USAGE = 10**9  # tokens of one request; a larger number is not believed


class _Part(BaseModel):
    """Base of an answer's parts. Further keys are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _Function(_Part):
    name: str
    arguments: str | None = None


class _ToolCall(_Part):
    id: str
    function: _Function


class _Message(_Part):
    content: str | None = None
    rejection: Annotated[str | None, Field(alias="refusal")] = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(_Part):
    message: _Message
    finish_reason: str | None = None


class _Completion(_Part):
    choices: Annotated[list[_Choice], Field(min_length=1)]


def num_reported_tokens(answer: Mapping[str, Any], key: str) -> int | None:
    """Return a number of tokens in the answer's `usage`; None if it has no usable one."""
    usage = answer.get("usage")
    count = usage.get(key) if isinstance(usage, Mapping) else None
    return count if type(count) is int and 0 < count <= _MAX_USAGE else None


class RateLimit:
    """A budget that grows by `per_minute` each minute, up to that amount; None: no limit.

    All requests share it. It may be overdrawn: then the next caller waits until it is balanced.
    """

    def __init__(self, per_minute: int | None) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute or 0)
        self._filled_at = time.monotonic()

    async def take(self, amount: float) -> None:
        """Take an amount, and wait as long as the budget is overdrawn."""
        if self._per_minute is None:
            return
        now = time.monotonic()
        filled = (now - self._filled_at) * self._per_minute / 60
        self._left = min(float(self._per_minute), self._left + filled) - amount
        self._filled_at = now
        if self._left < 0:
            await asyncio.sleep(-self._left * 60 / self._per_minute)


class ChatClient:
    """The client of one endpoint. Use it in `async with`; all requests share its connections."""

    def __init__(
        self, config: EndpointBlock, *, block: str = "engine", cache_dir: str | None = None
    ) -> None:
        """block: the configuration block that the endpoint belongs to, for error messages."""
        self._config = config
        self._block = block
        self.url = config.base_url.rstrip("/") + _PATH
        self._cache = ResponseCache(Path(cache_dir), f"{block}.cache_dir") if cache_dir else None
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._requests = RateLimit(config.requests_per_minute)
        self._tokens = RateLimit(config.tokens_per_minute)
        self._http = HttpClient(config.base_url, bearer(config.api_key))

    async def __aenter__(self) -> "ChatClient":
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.__aexit__()

    async def complete(self, body: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
        """Return the endpoint's JSON for this body: it has a choice with a message.

        num_tokens: the most that the request may use, for the limit of tokens per minute.

        Raises:
            RequestRejectedError: the endpoint rejects the request, and would reject it again.
            EngineError: there was no answer in `max_retries` further tries.
        """
        if self._cache and (known := self._cache.read(self.url, body)) is not None:
            with suppress(TransientError):  # a file that somebody has changed
                return _checked(known)
        async with self._slots:
            response = await self._ask(body, num_tokens)
        if self._cache:
            self._cache.write(self.url, body, response)
        return response

    async def _ask(self, body: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
        max_retries = self._config.max_retries
        try:
            return await repeated(partial(self._post, body, num_tokens), max_retries)
        except TransientError as why:
            raise EngineError(
                f"{self.url} gave no answer in {max_retries + 1} tries, the last time: {why}; see "
                f"the provider's status, or raise {self._block}.max_retries"
            ) from why

    async def _post(self, body: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
        await self._requests.take(1)
        await self._tokens.take(num_tokens)
        response = await post(
            self._http,
            _PATH,
            body,
            timeout_s=self._config.timeout_s,
            key=f"{self._block}.timeout_s",
            max_bytes=MAX_BYTES,
        )
        content = response.content
        if response.status != 200:
            self._reject(response.status, content)
        try:
            answer = parse_untrusted(content)
        except ValueError as error:
            raise TransientError(
                f"an answer that is not JSON ({error}): {quoted(content, MAX_QUOTED)}"
            ) from error
        return _checked(answer)

    def _reject(self, status: int, content: bytes) -> NoReturn:
        if status in (401, 403):
            expected = f"set {self._block}.api_key, preferably as ${{oc.env:OPENAI_API_KEY}}"
        elif status in (301, 302, 307, 308, 404):
            expected = f"see {self._block}.base_url and {self._block}.model={self._config.model}"
        else:
            expected = (
                f"{self._block}.parameters adds, changes or (by null) leaves out request fields"
            )
        raise RequestRejectedError(
            f"{self.url} answered {status}: {quoted(content, MAX_QUOTED)}; {expected}", status
        )


def _checked(answer: Any) -> dict[str, Any]:
    """Return the answer. Raises TransientError if it is not a whole completion with a message."""
    seen = quoted(repr(answer), MAX_QUOTED)
    if isinstance(answer, dict) and answer.get("error"):
        raise TransientError(f"status 200 with an error in its body: {seen}")
    try:
        choice = _Completion.model_validate(answer).choices[0]
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the answer"
        raise TransientError(
            f"an answer that is no chat completion, at {where}: {first['msg']}: {seen}"
        ) from None
    if choice.finish_reason in _GIVEN_UP:
        raise TransientError(f"a reply that ended with finish_reason {choice.finish_reason}")
    assert isinstance(answer, dict)
    return answer
