"""Chat completions over HTTP, with rate limits, retries and a cache."""

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from openenv_pipe.config.schema import EndpointBlock
from openenv_pipe.engines.openai.limits import RateLimit
from openenv_pipe.errors import EngineError, RequestRefusedError
from openenv_pipe.system.foreign_text import quoted
from openenv_pipe.system.http import MAX_BYTES, Access, HttpClient
from openenv_pipe.system.http_retries import MAX_QUOTED, PassingError, post, repeated
from openenv_pipe.system.response_cache import ResponseCache

_PATH = "/chat/completions"


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
        max_retries = self._config.max_retries
        try:
            return await repeated(partial(self._post, body, num_tokens), max_retries)
        except PassingError as why:
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
            self._refuse(response.status, content)
        try:
            answer = json.loads(content)
        except ValueError as error:
            raise PassingError(
                f"an answer that is not JSON: {quoted(content, MAX_QUOTED)}"
            ) from error
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise PassingError(f"an answer without choices: {quoted(content, MAX_QUOTED)}")
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
            f"{self.url} answered {status}: {quoted(content, MAX_QUOTED)}; {expected}", status
        )
