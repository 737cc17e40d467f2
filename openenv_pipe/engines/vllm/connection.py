"""Requests to one vLLM server, and what their failures mean.

Nothing is retried here. A request that gets no answer raises ServerGoneError, and `replica.py`
decides whether the server is started again.
"""

import asyncio
from collections.abc import Container
from typing import Any, Self

from openenv_pipe.engines.vllm.answers import QUOTE, ServerGoneError
from openenv_pipe.errors import EngineError
from openenv_pipe.registry import if_command
from openenv_pipe.system.http import HttpClient, HttpError, bearer
from openenv_pipe.system.untrusted_text import quoted

BASE = "base"  # the name in requests of the model without an adapter
KEEP_ALIVE_S = 300.0  # of idle connections; the server is told to keep them longer
CALL_LIMIT_S = 120.0  # time limit of all calls except completions and those that bring all weights
SLOWEST_BYTES_PER_S = 50e6  # of a disk that a server reads weights from, or a network
REJECTED = range(400, 500)  # statuses of requests that the server rejects
GENERATE = "/inference/v1/generate"
# What a server was started without if it answers a path with 404.
NEEDED = {
    GENERATE: f"--enable-scale-out and --served-model-name {BASE}",
    "/v1/load_lora_adapter": "--enable-lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and the folder "
    "of the weights under the same path, readable by its user",
    **dict.fromkeys(("/pause", "/collective_rpc", "/sleep"), "VLLM_SERVER_DEV_MODE=1"),
}


def weights_limit_s(num_bytes: int) -> float:
    """Return the time limit of a call in which a server gets all weights, of that size."""
    return CALL_LIMIT_S + num_bytes / SLOWEST_BYTES_PER_S


class StatusError(EngineError):
    """The server rejected a request with the HTTP status `status`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class VllmConnection:
    """The connections to one server. Use it in `async with`; all requests share them."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._http = HttpClient(
            url, bearer(api_key), idle_connection_s=KEEP_ALIVE_S, use_proxy=False
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.__aexit__()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, because its server is gone or was replaced."""
        return self._http.is_closed

    async def check_health(self, limit_s: float) -> str | None:
        """See `system.readiness.check_health`."""
        try:
            status = await self.health_status(limit_s)
        except ServerGoneError as error:
            return str(error)
        return None if status == 200 else str(status)

    async def health_status(self, limit_s: float) -> int:
        """Return the status of the health check. Raises ServerGoneError."""
        status, _ = await self._call("GET", "/health", None, limit_s)
        return status

    async def is_healthy(self, limit_s: float) -> bool:
        """Whether the server answers its health check within `limit_s` seconds."""
        return await self.check_health(limit_s) is None

    async def _post(
        self,
        path: str,
        body: Any = None,
        limit_s: float = CALL_LIMIT_S,
        accepted: Container[int] = (),
    ) -> bytes:
        return await self._request("POST", path, body, limit_s, accepted)

    async def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        limit_s: float = CALL_LIMIT_S,
        accepted: Container[int] = (),
    ) -> bytes:
        """Return the content of an answer with status 200 or one of those accepted."""
        status, content = await self._call(method, path, body, limit_s)
        if status == 200 or status in accepted:
            return content
        seen = f"status {status}: {quoted(content, QUOTE)}"
        if status >= 500 and not await self._survived():
            raise ServerGoneError(f"{path}: {seen}")
        needed = NEEDED.get(path.partition("?")[0]) if status == 404 else None
        how = if_command("engine", ": `openenv-pipe engine command` prints its command")
        advice = f"; the server needs {needed}{how}" if needed else ""
        raise StatusError(f"{self.url}{path} answered with {seen}{advice}", status)

    async def _call(self, method: str, path: str, body: Any, limit_s: float) -> tuple[int, bytes]:
        """Return status and content. After a cancellation the server aborts the request."""
        if self._http.is_closed:  # by its replica, in the meantime
            raise ServerGoneError(f"{path}: the server has been replaced")
        try:
            response = await self._http.request(method, path, timeout_s=limit_s, body=body)
        except HttpError as error:
            raise ServerGoneError(f"{path}: {error}") from error
        return response.status, response.content

    async def _survived(self) -> bool:
        """Whether the server still answers a second after an internal error."""
        await asyncio.sleep(1.0)
        return await self.is_healthy(5.0)
