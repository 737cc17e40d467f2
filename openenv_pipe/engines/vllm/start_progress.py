"""What a starting server is at, read from its log: a start takes minutes, and silence worries."""

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
MOST_READ = 1 << 20  # bytes of the log at a look


class StartProgress:
    """Tells each phase once."""

    def __init__(self, log: Path | None, tell: Callable[[str], None]) -> None:
        self._log = log
        self._tell = tell
        self._started_s = time.monotonic()
        self._read_to = log.stat().st_size if log is not None and log.exists() else 0
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
                self._tell(f"engine: {words.format(*found.groups())} ({self.elapsed_s:.0f} s)")
