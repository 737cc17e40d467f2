"""Chat completions over HTTP, with rate limits, retries and a cache."""

import asyncio
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from openenv_pipe.config.schema import EndpointBlock
from openenv_pipe.engines.openai.limits import RateLimit
from openenv_pipe.errors import EngineError, RequestRefusedError
from openenv_pipe.system.foreign_text import quoted
from openenv_pipe.system.http import Access, HttpClient, HttpError, Response
from openenv_pipe.system.response_cache import ResponseCache

_PATH = "/chat/completions"
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # statuses after which it tries again
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 60.0
_LONGEST_QUOTE = 300  # characters of an answer in an error


class ChatClient:
    """The client of one endpoint. Use it in `async with`; all requests share its connections."""

    def __init__(
        self, config: EndpointBlock, *, block: str = "engine", cache_dir: str | None = None
    ) -> None:
        """block: the configuration block that the endpoint belongs to, for error messages."""
        self._config = config
        self._block = block
        self.url = config.base_url.rstrip("/") + _PATH
        self._cache = ResponseCache(Path(cache_dir), "engine.cache_dir") if cache_dir else None
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._requests = RateLimit(config.requests_per_minute)
        self._tokens = RateLimit(config.tokens_per_minute)
        key = config.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = HttpClient(config.base_url, Access(headers=headers))

    async def __aenter__(self) -> "ChatClient":
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.__aexit__()

    async def complete(self, body: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
        """Return the endpoint's JSON for this body.

        Args:
            num_tokens: what the request may cost at most, for the limit of tokens per minute.

        Raises:
            RequestRefusedError: the endpoint refuses the request, and would refuse it again.
            EngineError: there was no answer in `max_retries` further tries.
        """
        if self._cache and (known := self._cache.read(self.url, body)) is not None:
            return known
        async with self._slots:
            response = await self._ask(body, num_tokens)
        if self._cache:
            self._cache.write(self.url, body, response)
        return response

    async def _ask(self, body: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
        why = ""
        for attempt in range(self._config.max_retries + 1):
            await self._requests.take(1)
            await self._tokens.take(num_tokens)
            try:
                return await self._post(body)
            except _PassingError as error:
                why = str(error)
                if attempt < self._config.max_retries:
                    await asyncio.sleep(error.wait_s or _backoff_s(attempt))
        raise EngineError(
            f"{self.url} gave no answer in {self._config.max_retries + 1} tries, the last time: "
            f"{why}; see the provider's status, or raise {self._block}.max_retries"
        )

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        limit_s = self._config.timeout_s
        try:
            response = await self._http.request("POST", _PATH, timeout_s=limit_s, body=body)
        except HttpError as error:
            raise _PassingError(f"{error} ({self._block}.timeout_s={limit_s:g})") from error
        content = response.content
        if response.status in _PASSING:
            raise _PassingError(
                f"status {response.status}, {quoted(content, _LONGEST_QUOTE)}",
                _asked_wait_s(response),
            )
        if response.status != 200:
            self._refuse(response.status, content)
        try:
            answer = json.loads(content)
        except ValueError as error:
            raise _PassingError(
                f"an answer that is not JSON: {quoted(content, _LONGEST_QUOTE)}"
            ) from error
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise _PassingError(f"an answer without choices: {quoted(content, _LONGEST_QUOTE)}")
        return answer

    def _refuse(self, status: int, content: bytes) -> NoReturn:
        if status in (401, 403):
            expected = f"set {self._block}.api_key, best as ${{oc.env:OPENAI_API_KEY}}"
        elif status in (301, 302, 307, 308, 404):
            expected = f"see {self._block}.base_url and {self._block}.model={self._config.model}"
        else:
            expected = (
                f"{self._block}.parameters adds, changes or (by null) leaves out request fields"
            )
        raise RequestRefusedError(
            f"{self.url} answered {status}: {quoted(content, _LONGEST_QUOTE)}; {expected}", status
        )


class _PassingError(Exception):
    """A failure after which a retry may succeed, `wait_s` later if the endpoint names a time."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def _asked_wait_s(response: Response) -> float | None:
    """Return the seconds of Retry-After, bounded; None if it is missing or is a date."""
    try:
        return min(float(response.headers["Retry-After"]), _LONGEST_WAIT_S)
    except (KeyError, ValueError):
        return None


def _backoff_s(attempt: int) -> float:
    """Return a wait that doubles with each try, spread so that clients do not retry together."""
    longest = min(_FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S)
    return longest * (0.5 + random.random() / 2)
