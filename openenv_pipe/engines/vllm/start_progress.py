"""What a starting server is at, read from its log: a start takes minutes, and silence worries.

And why it ended: a death is logged by each of its processes, and the last ones say nothing of it.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path

PHASES = (  # patterns of vLLM's log lines, in the order in which they come
    (re.compile(r"Resolved architecture: (\w+)"), "architecture {}"),
    (re.compile(r"Starting to load model"), "loading weights"),
    (re.compile(r"Loading weights took ([\d.]+) seconds"), "weights loaded in {} s"),
    (re.compile(r"torch\.compile takes ([\d.]+) s"), "compiled in {} s"),
    (re.compile(r"KV cache size: ([\d,]+) tokens"), "room for {} tokens of keys and values"),
    (re.compile(r"Capturing CUDA graphs"), "capturing CUDA graphs"),
)
CAUSE = re.compile(rb"\b\w+Error: .+")
MOST_READ = 1 << 20  # bytes of the log at a look


class StartProgress:
    """Tells each phase once."""

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

    def look(self) -> None:
        """Reads what the log has got since the last look."""
        if self._log is None or not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._read_to)
            content = file.read(MOST_READ)
        whole = content[: content.rfind(b"\n") + 1]
        self._read_to += len(whole)
        text = whole.decode(errors="replace")
        for phase in list(self._left):
            pattern, words = phase
            if found := pattern.search(text):
                self._left.remove(phase)
                self._tell(f"{words.format(*found.groups())} ({self.elapsed_s:.0f} s)")

    def cause_of_death(self) -> str | None:
        """The first error in the log since this start, None if there is none."""
        if self._log is None or not self._log.exists():
            return None
        with self._log.open("rb") as file:
            file.seek(self._began_at)
            found = CAUSE.search(file.read(MOST_READ))
        return found.group().decode(errors="replace") if found else None
