"""Train an agent from where it runs: open episodes of a training server, and report rewards.

    with Client("http://127.0.0.1:8000") as client, client.rollout() as rollout:
        model = OpenAI(base_url=rollout.base_url, api_key=rollout.api_key)
        ...  # the agent as it is, with `model`
        rollout.finish(reward=1.0)

The server is started by `openenv-pipe serve --train`. This module needs httpx, and nothing of the
package but its errors: no torch is loaded.
"""

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import (
    AsyncExitStack,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal

from openenv_pipe.errors import FailureError, PipeError

_log = logging.getLogger(__name__)

MODEL = "policy"  # the name of the model that is trained
TOKEN_VARIABLE = "OPENENV_PIPE_TOKEN"
ASK_S = 20.0  # how long the server waits for an episode in one request
LOOPBACK = ("127.0.0.1", "localhost", "::1")
RETRY_S = 1.0  # between two tries
WARN_S = 10.0  # a client without an episode for so long logs a warning
WARN_EVERY_S = 60.0
NO_TOKEN = 401
TRAINING_ENDED = 410
LATER = (429, 502, 503, 504)  # status codes after which an episode may still come
TIMEOUT = httpx.Timeout(60.0, read=900.0)  # of one request; a model call may wait for others


class ClientError(FailureError):
    """The training server rejects what a client asks for, or cannot be reached."""


class TrainingEndedError(ClientError):
    """The server has trained all its steps, and opens no further episode."""


class RolloutEndedError(ClientError):
    """The episode is over: it was reported, or its group was trained without it."""


class _NoAnswerError(ClientError):
    """The server cannot be reached: it has ended, or the connection to it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What the environment of a rollout answered."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class AsyncRollout:
    """One episode: where its model is, its task, and its end."""

    def __init__(self, http: httpx.AsyncClient, opened: Mapping[str, Any]) -> None:
        self._http = http
        self.url = str(http.base_url).rstrip("/")  # for Anthropic's and Google's clients
        self.base_url = f"{self.url}/v1"  # for OpenAI's clients
        self.api_key: str = opened["key"]  # valid for this rollout only
        self.model = MODEL
        self.env_url = f"{self.url}/openenv/{self.api_key}"  # for OpenEnv's clients
        self.task: dict[str, Any] = opened["task"]  # its id, first messages, observation and tools
        self.group: str = opened["group"]  # the id of its group, within which it is compared
        self.group_size: int = opened["group_size"]
        self.status: str | None = None  # how it ended, after `finish` or `fail`

    async def chat(self, messages: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
        """Request a chat completion from the model, and return its message.

        Raises ClientError if there is no answer.
        """
        body = {"model": MODEL, "messages": messages, **settings}
        headers = {"Authorization": f"Bearer {self.api_key}"}
        answer = await _post(self._http, "/v1/chat/completions", body, headers)
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        """Take a step in the environment of the run. Raises ClientError if it is rejected."""
        path = f"/openenv/{self.api_key}/step"
        answer = await _post(self._http, path, {"action": dict(action)})
        return StepResult(
            observation=answer["observation"], reward=answer["reward"], done=answer["done"]
        )

    async def finish(
        self, reward: float | None = None, metrics: Mapping[str, float] | None = None
    ) -> str:
        """End the episode, and return its status.

        reward: added to the rewards of the environment's steps; None: nothing is added, and the
            run's reward terms decide, such as a judge.
        metrics: further numbers to record, by name.

        Numbers may be scalars of numpy and torch, bools, Decimals and Fractions.

        Raises:
            RolloutEndedError: the episode is over already.
            ClientError: the server rejects the report, or a value is not a finite number.
        """
        numbers = {name: _number(name, value) for name, value in (metrics or {}).items()}
        own = None if reward is None else _number("reward", reward)
        return await self._end({"reward": own, "metrics": numbers})

    async def fail(self, error: str) -> str:
        """End an episode that could not be played; it is not trained on."""
        return await self._end({"error": error})

    async def _end(self, report: Mapping[str, Any]) -> str:
        if self.status is not None:
            raise RolloutEndedError(
                f"this episode has ended with the status {self.status}: finish or fail was called "
                "before; open another rollout"
            )
        answer = await _post(self._http, f"/rollouts/{self.api_key}/end", report)
        self.status = str(answer["status"])
        return self.status


class AsyncClient:
    """Opens episodes of a training server, any number at once. Enter it before use."""

    def __init__(self, url: str = "http://127.0.0.1:8000", token: str | None = None) -> None:
        """url: the server's; it may end in /v1, as for OpenAI's clients.

        token: the server's; None: the value of the environment variable OPENENV_PIPE_TOKEN.
        """
        url = url.rstrip("/").removesuffix("/v1")
        self._token = token or os.environ.get(TOKEN_VARIABLE)
        self._run: str | None = None  # the id of the run whose episodes it plays
        self._next_warning = 0.0  # the earliest time of the next warning, by time.monotonic
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        is_near = urlsplit(url).hostname in LOOPBACK  # no proxy can reach it
        self._http = httpx.AsyncClient(
            base_url=url, timeout=TIMEOUT, limits=limits, trust_env=not is_near
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._http.__aexit__(*error)

    @asynccontextmanager
    async def rollout(
        self, task: Mapping[str, Any] | None = None, *, timeout_s: float = 600.0
    ) -> AsyncIterator[AsyncRollout]:
        """Open an episode for the block; it is lost unless the block calls `finish` or `fail`.

        An exception in the block is reported to the server and raised again. If the server or the
        episode had ended before, the exception is taken for a consequence: it is only logged as a
        warning, and the next `rollout` waits for an episode or a server.

        task: your own, as keywords of a reset; equal tasks form one group. None: one of the run's.
        timeout_s: how long to wait for an episode, or for a server that does not answer.

        Raises:
            TrainingEndedError: there are no more episodes.
            ClientError: the server rejects the request, or no episode opens within `timeout_s`.
        """
        began = time.monotonic()
        latest = began + timeout_s
        async with AsyncExitStack() as connection:
            while isinstance(rollout := await self._ask(task, latest, connection), str):
                self._warn(rollout, began, latest)
                await asyncio.sleep(RETRY_S)
            try:
                yield rollout
            except Exception as error:
                if rollout.status is not None or await _report(rollout, error):
                    raise
                _log.warning("an episode was lost, because the server has ended it: %r", error)

    async def _ask(
        self, task: Mapping[str, Any] | None, latest: float, connection: AsyncExitStack
    ) -> AsyncRollout | str:
        """Ask for an episode once; return it, or why there is none now.

        connection: receives what closes the connection of the episode, which stays open.

        Raises TrainingEndedError and ClientError.
        """
        wait_s = max(0.0, min(ASK_S, latest - time.monotonic()))
        body = {"task": task, "wait_s": wait_s, **({"run": self._run} if self._run else {})}
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        request = self._http.build_request("POST", "/rollouts", json=body, headers=headers)
        try:
            response = await self._http.send(request, stream=True)
            await connection.enter_async_context(aclosing(response))
            if response.is_success:
                lines = await connection.enter_async_context(aclosing(_lines(response)))
                opened = json.loads(await anext(lines))
                self._run = opened["run"]
                return AsyncRollout(self._http, opened)
            await response.aread()
        except (httpx.TransportError, StopAsyncIteration) as error:
            problem = f"no server answers at {self._http.base_url}: {error!r}"
        else:
            problem = _problem(response)
            if response.status_code == TRAINING_ENDED:
                raise TrainingEndedError(problem)
            if response.status_code == NO_TOKEN:
                sent = "the one that was sent is wrong" if self._token else "none was sent"
                raise ClientError(f"{problem}; {sent}: set {TOKEN_VARIABLE}, or Client(url, token)")
            if response.status_code not in LATER:
                raise ClientError(problem)
        await connection.aclose()
        if time.monotonic() + RETRY_S >= latest:
            raise ClientError(f"no episode within the time limit; the last answer: {problem}")
        return problem

    def _warn(self, problem: str, began: float, latest: float) -> None:
        """Log why there has long been no episode; one warning is for all that wait."""
        now = time.monotonic()
        if now < max(began + WARN_S, self._next_warning):
            return
        self._next_warning = now + WARN_EVERY_S
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + latest - now))
        _log.warning("no episode for %.0f s: %s; trying until %s", now - began, problem, until)


class Rollout:
    """One episode, as `AsyncRollout`, for programs without an event loop."""

    def __init__(self, portal: BlockingPortal, rollout: AsyncRollout) -> None:
        self._portal = portal
        self._rollout = rollout
        self.url = rollout.url
        self.base_url = rollout.base_url
        self.api_key = rollout.api_key
        self.model = rollout.model
        self.env_url = rollout.env_url
        self.task = rollout.task
        self.group = rollout.group
        self.group_size = rollout.group_size

    @property
    def status(self) -> str | None:
        """How the episode ended, after `finish` or `fail`."""
        return self._rollout.status

    def chat(self, messages: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
        """As `AsyncRollout.chat`."""
        return self._portal.call(lambda: self._rollout.chat(messages, **settings))

    def step(self, action: Mapping[str, Any]) -> StepResult:
        """As `AsyncRollout.step`."""
        return self._portal.call(self._rollout.step, action)

    def finish(
        self, reward: float | None = None, metrics: Mapping[str, float] | None = None
    ) -> str:
        """As `AsyncRollout.finish`."""
        return self._portal.call(self._rollout.finish, reward, metrics)

    def fail(self, error: str) -> str:
        """As `AsyncRollout.fail`."""
        return self._portal.call(self._rollout.fail, error)


class Client:
    """As `AsyncClient`, for programs without an event loop. Threads may share a client."""

    def __init__(self, url: str = "http://127.0.0.1:8000", token: str | None = None) -> None:
        """The arguments are those of `AsyncClient`."""
        self._client = AsyncClient(url, token)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._portal = self._open.enter_context(start_blocking_portal())
        self._open.enter_context(self._portal.wrap_async_context_manager(self._client))
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    @contextmanager
    def rollout(
        self, task: Mapping[str, Any] | None = None, *, timeout_s: float = 600.0
    ) -> Iterator[Rollout]:
        """As `AsyncClient.rollout`."""
        opening = self._client.rollout(task, timeout_s=timeout_s)
        with self._portal.wrap_async_context_manager(opening) as rollout:
            yield Rollout(self._portal, rollout)


async def _lines(response: httpx.Response) -> AsyncGenerator[str, None]:
    """Yield the lines of an answer that stays open: closing the generator closes the connection."""
    async for line in response.aiter_lines():
        yield line


async def _post(
    http: httpx.AsyncClient,
    path: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Send JSON, and return the JSON of the answer. Raises ClientError."""
    try:
        response = await http.post(path, json=body, headers=headers)
    except httpx.TransportError as error:
        raise _NoAnswerError(f"{http.base_url} does not answer: {error!r}") from error
    if response.is_success:
        return response.json()
    if response.status_code in (401, 404):
        raise RolloutEndedError(_problem(response))
    if response.status_code in LATER:
        raise _NoAnswerError(_problem(response))
    raise ClientError(_problem(response))


def _number(name: str, value: Any) -> float:
    """Return a number as a float for JSON. Raises ClientError if it is not a finite number."""
    item = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(item, Real | Decimal):
        with suppress(ValueError, OverflowError):  # a signalling NaN, 10 ** 400
            number = float(item)
            if math.isfinite(number):
                return number
    raise ClientError(f"{name} is {value!r:.40}; expected a finite number")


async def _report(rollout: AsyncRollout, error: Exception) -> bool:
    """Tell the server why an episode failed; return False if the episode or server has ended."""
    try:
        await rollout.fail(f"{type(error).__name__}: {error}")
    except (RolloutEndedError, _NoAnswerError):
        return False
    except PipeError as problem:
        error.add_note(f"the server was not told: {problem}")
    return True


def _problem(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    return f"{response.url.path} answered {response.status_code}: {message}"
