"""The server's own metrics, for each step: what was highest while it worked, and what was counted.

Names are vLLM's, without their prefix; see https://docs.vllm.ai, "Production Metrics".
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable

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

    async def summary(self) -> dict[str, float]:
        """Since the last one."""
        await self._look()
        if not self._last:
            return {}
        grown = {
            name: max(0.0, value - self._before.get(name, 0.0))
            for name, value in self._last.items()
        }
        summary = {ours: self._highest.get(ours, 0.0) for ours in GAUGES}
        summary |= {ours: grown.get(name, 0.0) for ours, name in COUNTERS.items()}
        if grown.get(QUERIES):
            summary["engine/prefix_hit_share"] = grown.get(HITS, 0.0) / grown[QUERIES]
        self._before, self._highest = self._last, {}
        return summary

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
