"""Report the progress of a starting vLLM server, and the cause of its death, from its log.

A start takes minutes. When a server dies, each of its processes logs the end, so the last lines
rarely name the cause.
"""

import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from openenv_pipe.engines.vllm.client import VllmClient

PHASES = (  # patterns of vLLM's log lines, in the order of a start, and what to report
    (re.compile(r"Resolved architecture: (\w+)"), "architecture {}"),
    (re.compile(r"Starting to load model"), "loading weights"),
    (re.compile(r"Loading weights took ([\d.]+) seconds"), "weights loaded in {} s"),
    (re.compile(r"torch\.compile takes ([\d.]+) s"), "compiled in {} s"),
    (re.compile(r"KV cache size: ([\d,]+) tokens"), "KV cache for {} tokens"),
    (re.compile(r"Capturing CUDA graphs"), "capturing CUDA graphs"),
)
CAUSE = re.compile(rb"\b\w+Error: .+")
MAX_READ_BYTES = 1 << 20  # of the log, each time


class StartProgress:
    """Reports each phase of a start once."""

    def __init__(self, log: Path | None, tell: Callable[[str], None]) -> None:
        self._log = log
        self._tell = tell
        self._started_s = time.monotonic()
        self._began_at = log.stat().st_size if log is not None and log.exists() else 0
        self._read_to = self._began_at
        self._left = list(PHASES)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def watching(self, client: VllmClient) -> Callable[[float], Awaitable[str | None]]:
        """Return a health check for `wait_until_healthy` that also reports progress."""

        async def check(timeout_s: float) -> str | None:
            seen = await client.check_health(timeout_s)
            self._report()
            return seen

        return check

    def _report(self) -> None:
        """Read what was added to the log since the last call."""
        if self._log is None or not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._read_to)
            content = file.read(MAX_READ_BYTES)
        whole = content[: content.rfind(b"\n") + 1]
        self._read_to += len(whole)
        text = whole.decode(errors="replace")
        for phase in list(self._left):
            pattern, words = phase
            if found := pattern.search(text):
                self._left.remove(phase)
                self._tell(f"{words.format(*found.groups())} ({self.elapsed_s:.0f} s)")

    def cause_of_death(self) -> str | None:
        """Return the first error in the log since this start; None if there is none."""
        if self._log is None or not self._log.exists():
            return None
        with self._log.open("rb") as file:
            file.seek(self._began_at)
            found = CAUSE.search(file.read(MAX_READ_BYTES))
        return found.group().decode(errors="replace") if found else None
