"""A server's own metrics, summed up for each step: maxima of gauges, growth of counters.

The server's names are vLLM's without their prefix; see https://docs.vllm.ai, "Production Metrics".
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

_LINE = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? (\d+(?:\.\d+)?(?:e[+-]?\d+)?)$", re.MULTILINE)
LOOK_EVERY_S = 1.0
GAUGES = {  # our name: the server's; the maximum is kept
    "engine/running_max": "num_requests_running",
    "engine/waiting_max": "num_requests_waiting",
    "engine/cache_use_max": "kv_cache_usage_perc",
}
COUNTERS = {  # our name: the server's; the growth is kept
    "engine/prompt_tokens": "prompt_tokens_total",
    "engine/generated_tokens": "generation_tokens_total",
    "engine/preemptions": "num_preemptions_total",
}
HITS, QUERIES = "prefix_cache_hits_total", "prefix_cache_queries_total"


def read_metrics(text: str) -> dict[str, float]:
    """Read values by name from the text of a metrics page; those of several engines are added."""
    values: dict[str, float] = {}
    for name, value in _LINE.findall(text):
        values[name] = values.get(name, 0.0) + float(value)
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The measurements of one server; empty if it was down."""

    highest: dict[str, float]  # maxima of gauges, by our names
    grown: dict[str, float]  # growth of counters, by the server's names


def summarise(servers: Sequence[Measured]) -> dict[str, float]:
    """Return maxima and sums over all servers, and also of each server if there are several."""
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
    """Reads a server's metrics every second, and whenever a step is summed up."""

    def __init__(self, read: Callable[[], Awaitable[str | None]]) -> None:
        """read: returns the text of the metrics page; None while the server is down."""
        self._read = read
        self._before: dict[str, float] = {}  # counters at the last summary
        self._last: dict[str, float] = {}
        self._highest: dict[str, float] = {}
        self._looking: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin to read every second. What the server has counted before is not the run's."""
        await self._look()
        self._before, self._highest = self._last, {}
        self._looking = asyncio.create_task(self._look_on())

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking

    async def measured(self) -> Measured:
        """Return what was measured since the last call."""
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
            self._before = {}  # a restarted server counts from 0
        self._last = found
        for ours, name in GAUGES.items():
            self._highest[ours] = max(self._highest.get(ours, 0.0), found.get(name, 0.0))
