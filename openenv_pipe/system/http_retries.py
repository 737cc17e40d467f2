"""Repeat a request to an endpoint when it failed for a reason that may pass."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from openenv_pipe.system.http import HttpClient, HttpError, Response
from openenv_pipe.system.untrusted_text import quoted

PASSING = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # statuses after which to try again
SETTINGS_STATUSES = {*range(300, 400), 401, 403, 404}  # wrong for every request: not repeated
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
MAX_QUOTED = 300  # characters of an answer in an error
Result = TypeVar("Result")


class TransientError(Exception):
    """A failure after which a retry may succeed, `wait_s` later if the endpoint names a time."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


async def repeated(attempt: Callable[[], Awaitable[Result]], max_retries: int) -> Result:
    """Return the result of the first attempt that does not raise TransientError.

    Raises TransientError: that of the last attempt, after `max_retries` retries.
    """
    for number in range(max_retries):
        try:
            return await attempt()
        except TransientError as error:
            await asyncio.sleep(error.wait_s or _backoff_s(number))
    return await attempt()


async def post(
    client: HttpClient,
    path: str,
    body: object,
    *,
    timeout_s: float,
    max_bytes: int,
    key: str = "",
) -> Response:
    """Post JSON and return the answer, unless its status may pass.

    Args:
        max_bytes: content beyond it is cut off.
        key: the configuration key of the time limit, for the message; empty: it has none.

    Raises:
        TransientError: there is no answer, or one with a status that may pass.
    """
    try:
        response = await client.request(
            "POST", path, timeout_s=timeout_s, body=body, max_bytes=max_bytes
        )
    except HttpError as error:
        raise TransientError(f"{error} ({key}={timeout_s:g})" if key else str(error)) from error
    if response.status in PASSING:
        told = f"status {response.status}, {quoted(response.content, MAX_QUOTED)}"
        raise TransientError(told, _asked_wait_s(response))
    return response


def _asked_wait_s(response: Response) -> float | None:
    """Return the seconds of Retry-After, bounded; None if it is missing or is a date."""
    try:
        wait_s = float(response.headers["Retry-After"])
    except (KeyError, ValueError):
        return None
    return min(wait_s, LONGEST_WAIT_S) if wait_s >= 0.0 else None  # NaN would never end


def _backoff_s(number: int) -> float:
    """Return a wait that doubles with each try, spread so that clients do not retry together."""
    longest = min(FIRST_WAIT_S * 2**number, LONGEST_WAIT_S)
    return longest * (0.5 + random.random() / 2)
