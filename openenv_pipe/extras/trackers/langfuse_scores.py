"""Rewards as scores of Langfuse, which it does not take from OpenTelemetry's events.

They are sent to the ingestion API of the same server (POST /api/public/ingestion), after the traces
that they belong to: https://langfuse.com/docs/api. A score that is sent again has the same id, and
replaces the earlier one.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from openenv_pipe.extras.trackers.episode_trace import scores_of
from openenv_pipe.system.http import Access, HttpClient
from openenv_pipe.types import Episode

TRACES = "/api/public/otel/v1/traces"  # the end of the endpoint that takes traces
INGESTION = "/api/public/ingestion"
SCORES_PER_REQUEST = 200
MAX_ANSWER_BYTES = 2**20
MULTI_STATUS = 207  # some may have been taken, and some rejected
MAX_SHOWN = 200  # characters of a rejection


def server_of(endpoint: str) -> str | None:
    """Return the address of the Langfuse server that has this endpoint; None for other tools."""
    return endpoint.removesuffix(TRACES) if endpoint.endswith(TRACES) else None


def send_scores(
    server: str,
    headers: Mapping[str, str],
    episodes: Sequence[tuple[int, Episode]],
    *,
    timeout_s: float,
) -> None:
    """Send the scores of episodes, each with the id of its trace.

    Raises ConnectionError and HttpError.
    """
    events = [event for trace, episode in episodes for event in _events(trace, episode)]
    asyncio.run(_send(server, headers, events, timeout_s))


async def _send(
    server: str, headers: Mapping[str, str], events: Sequence[Mapping[str, Any]], timeout_s: float
) -> None:
    async with HttpClient(server, Access(headers=headers)) as client:
        for start in range(0, len(events), SCORES_PER_REQUEST):
            answer = await client.request(
                "POST",
                INGESTION,
                timeout_s=timeout_s,
                body={"batch": events[start : start + SCORES_PER_REQUEST]},
                max_bytes=MAX_ANSWER_BYTES,
            )
            problem = _problem(answer.status, answer.content)
            if problem is not None:
                raise ConnectionError(f"{server}{INGESTION} has not taken scores: {problem}")


def _problem(status: int, content: bytes) -> str | None:
    """Say what the server has rejected; None if it has taken everything."""
    if status != MULTI_STATUS:
        return None if status in (200, 201) else f"HTTP status {status}"
    try:
        errors = json.loads(content)["errors"]
    except (ValueError, LookupError, TypeError):
        return "its answer is not the one of the ingestion API"
    return f"{errors!r:.{MAX_SHOWN}}" if errors else None


def _events(trace: int, episode: Episode) -> list[dict[str, Any]]:
    told = datetime.now(UTC).isoformat()
    events = []
    for name, value, comment in scores_of(episode):
        known = f"{trace:032x}-{name}"
        body = {
            "id": known,
            "traceId": f"{trace:032x}",
            "name": name,
            "value": value,
            "dataType": "NUMERIC",
            "comment": comment,
        }
        # Of two events with one id Langfuse keeps the first, so a repeated one needs another.
        events.append(
            {"id": f"{known}-{told}", "type": "score-create", "timestamp": told, "body": body}
        )
    return events
