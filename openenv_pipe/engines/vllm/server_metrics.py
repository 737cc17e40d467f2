"""A server's own metrics, for each step: what was highest while it worked, and what was counted.

Names are vLLM's, without their prefix; see https://docs.vllm.ai, "Production Metrics".
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

_LINE = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
LOOK_EVERY_S = 1.0
GAUGES = {  # ours: the server's, of which the highest is kept
    "engine/running_max": "num_requests_running",
    "engine/waiting_max": "num_requests_waiting",
    "engine/cache_use_max": "kv_cache_usage_perc",
}
COUNTERS = {  # ours: the server's, of which the growth is kept
    "engine/prompt_tokens": "prompt_tokens_total",
    "engine/generated_tokens": "generation_tokens_total",
    "engine/preemptions": "num_preemptions_total",
}
HITS, QUERIES = "prefix_cache_hits_total", "prefix_cache_queries_total"


def read_metrics(text: str) -> dict[str, float]:
    """Values by name from the server's page, those of several engines added."""
    values: dict[str, float] = {}
    for name, value in _LINE.findall(text):
        values[name] = values.get(name, 0.0) + float(value)
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Of one server; empty where there was none."""

    highest: dict[str, float]  # gauges, by our names
    grown: dict[str, float]  # counters, by the server's


def summarise(servers: Sequence[Measured]) -> dict[str, float]:
    """By our names: the highest of all servers, and what all of them counted; then, where there
    are several, the same of each under its number."""
    summary = _of_all(servers)
    if len(servers) > 1:
        for number, server in enumerate(servers):
            for name, value in _of_all([server]).items():
                summary[name.replace("engine/", f"engine/{number}/")] = value
    return summary


def _of_all(servers: Sequence[Measured]) -> dict[str, float]:
    def total(name: str) -> float:
        return sum(server.grown.get(name, 0.0) for server in servers)

    if not any(server.grown for server in servers):
        return {}
    summary = {
        ours: max(server.highest.get(ours, 0.0) for server in servers) for ours in GAUGES
    } | {ours: total(name) for ours, name in COUNTERS.items()}
    if queries := total(QUERIES):
        summary["engine/prefix_hit_share"] = total(HITS) / queries
    return summary


class ServerMetrics:
    """Looks every second while requests are under way, and whenever a step is summed up."""

    def __init__(self, read: Callable[[], Awaitable[str | None]]) -> None:
        """`read` gives the page's text, None while there is no server."""
        self._read = read
        self._before: dict[str, float] = {}  # counters at the last summary
        self._last: dict[str, float] = {}
        self._highest: dict[str, float] = {}
        self._looking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_on())

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking

    async def measured(self) -> Measured:
        """Since the last call."""
        await self._look()
        grown = {
            name: max(0.0, value - self._before.get(name, 0.0))
            for name, value in self._last.items()
        }
        measured = Measured(highest=self._highest, grown=grown)
        self._before, self._highest = self._last, {}
        return measured

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._look()

    async def _look(self) -> None:
        text = await self._read()
        if text is None:
            return
        found = read_metrics(text)
        if any(found.get(name, 0.0) < self._last.get(name, 0.0) for name in COUNTERS.values()):
            self._before = {}  # another server: it counts from 0
        self._last = found
        for ours, name in GAUGES.items():
            self._highest[ours] = max(self._highest.get(ours, 0.0), found.get(name, 0.0))
