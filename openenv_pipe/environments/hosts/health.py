"""Whether an environment server answers: GET /health."""

import asyncio
import time
from collections.abc import Coroutine
from urllib.parse import SplitResult, urlsplit

from openenv_pipe.errors import HostError

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
ATTEMPT_LIMIT_S = 5.0


async def wait_until_healthy(url: str, timeout_s: float, died: Coroutine[None, None, str]) -> None:
    """Return when `url`/health answers 200.

    died returns, with the cause, when the server is dead (see `Server.died`); it is used up.
    Raises HostError at once if the server dies, and at the time limit.
    """
    death = asyncio.create_task(died)
    health_check = asyncio.create_task(poll(url, timeout_s))
    try:
        await asyncio.wait({death, health_check}, return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            raise HostError(f"the server died before it was ready: {death.result()}")
        health_check.result()
    finally:
        death.cancel()
        health_check.cancel()
        await asyncio.gather(death, health_check, return_exceptions=True)


async def poll(url: str, timeout_s: float) -> None:
    """Ask until the answer is 200. Raises HostError at the time limit."""
    deadline = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    while (seen := await health(url, min(ATTEMPT_LIMIT_S, timeout_s))) != "200":
        if time.monotonic() + pause_s > deadline:
            raise HostError(f"{url}/health did not answer 200 within {timeout_s:g} s, saw: {seen}")
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)


async def health(url: str, timeout_s: float) -> str:
    """The HTTP status of `url`/health as text, or why there is none. Never raises."""
    parts = urlsplit(url)
    host, path = parts.netloc, parts.path.rstrip("/") + "/health"
    if parts.scheme == "unix":
        host, path = "localhost", "/health"
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await _connect(parts)
            writer.write(
                f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
            )
            status_line = (await reader.readline()).decode("latin-1").split()
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except (OSError, ValueError) as error:
        return str(error)
    finally:
        if writer is not None:
            writer.close()
    return status_line[1] if len(status_line) > 1 else "a closed connection"


async def _connect(parts: SplitResult) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if parts.scheme == "unix":
        return await asyncio.open_unix_connection(parts.path)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    return await asyncio.open_connection(parts.hostname, port, ssl=secure or None)
