"""Wait until a server is healthy, or until a server that others have started is gone.

A server is healthy if GET /health answers with status 200.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from openenv_pipe.errors import FailureError
from openenv_pipe.system.http import OPEN, Access, HttpError, fetch

Result = TypeVar("Result")

FIRST_PAUSE_S = 0.02
MAX_PAUSE_S = 0.5
ATTEMPT_LIMIT_S = 5.0
OUTAGE_POLL_S = 1.0
OUTAGE_CHECKS = 3  # failed ones in a row, after which a server counts as gone


class NotReadyError(FailureError):
    """A server died while it was starting, or did not become healthy in time."""


async def check_health(
    url: str, timeout_s: float, access: Access = OPEN, *, use_proxy: bool = False
) -> str | None:
    """Return None if the server at `url` is healthy, else the status or error seen instead.

    Args:
        use_proxy: see `HttpClient`; servers that this program starts are reached directly.
    """
    try:
        status, _ = await fetch(
            url, "/health", timeout_s=timeout_s, access=access, use_proxy=use_proxy
        )
    except HttpError as error:
        return str(error)
    return None if status == 200 else str(status)


async def wait_until_healthy(
    url: str,
    *,
    timeout_s: float,
    access: Access = OPEN,
    check: Callable[[float], Awaitable[str | None]] | None = None,
    key: str | None = None,
) -> None:
    """Poll the server at `url` until it is healthy.

    Args:
        access: for `check_health`, which makes the attempts unless there is a `check`.
        check: makes one attempt within the given number of seconds.
        key: of the configuration, whose value `timeout_s` is.

    Raises:
        NotReadyError: it is not healthy within `timeout_s` seconds.
    """
    check = check or partial(check_health, url, access=access)
    deadline = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    while True:
        left_s = max(deadline - time.monotonic(), FIRST_PAUSE_S)
        seen = await check(min(ATTEMPT_LIMIT_S, left_s))
        if seen is None:
            return
        if time.monotonic() + pause_s > deadline:
            advice = f"; raise {key} if the machine is busy" if key else ""
            raise NotReadyError(
                f"{url}/health did not answer 200 within {timeout_s:g} s, saw: {seen}{advice}"
            )
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, MAX_PAUSE_S)


async def unless_dead(step: Coroutine[Any, Any, Result], died: Coroutine[Any, Any, str]) -> Result:
    """Return the result of `step`, a part of a server's start, unless the server dies first.

    Args:
        died: returns with the cause when the server is dead.

    Raises:
        NotReadyError: the server died, for the cause in the message.
    """
    death, work = asyncio.create_task(died), asyncio.create_task(step)
    try:
        await asyncio.wait({death, work}, return_when=asyncio.FIRST_COMPLETED)
        if death.done():  # even if another server, at the same port, answers
            raise NotReadyError(f"the server died before it was ready: {death.result()}")
        return work.result()
    finally:
        death.cancel()
        work.cancel()
        await asyncio.gather(death, work, return_exceptions=True)


async def wait_for_outage(check: Callable[[], Awaitable[str | None]]) -> str:
    """Return a description when `OUTAGE_CHECKS` checks in a row have failed.

    Args:
        check: returns None if the server answers, else what was seen instead; see `check_health`.
    """
    num_failed, seen = 0, None
    while num_failed < OUTAGE_CHECKS:
        await asyncio.sleep(OUTAGE_POLL_S)
        seen = await check()
        num_failed = 0 if seen is None else num_failed + 1
    return f"no answer {OUTAGE_CHECKS} times in a row, the last time: {seen}"
