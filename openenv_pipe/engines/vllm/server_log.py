"""Why a vLLM server died, in its log.

When a server dies, each of its processes logs the end, so the last lines rarely name the cause.
"""

import re
from pathlib import Path

MAX_READ_BYTES = 1 << 20
# A line of a traceback that names an error, after the prefixes of vLLM's processes.
ERROR_LINE = re.compile(
    rb"^(?:\([^)\n]*\) )?(?:ERROR [^\]\n]*\] )?((?:\w+\.)*\w+Error: .+)", re.MULTILINE
)


def log_size(log: Path | None) -> int:
    """Return the size of a log in bytes; 0 if there is none yet."""
    return log.stat().st_size if log is not None and log.exists() else 0


def first_error(log: Path | None, begin: int) -> str:
    """Return the first error in a log from byte `begin` on; an empty text if there is none."""
    if log is None or not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(begin)
        found = ERROR_LINE.search(file.read(MAX_READ_BYTES))
    return found[1].decode(errors="replace") if found else ""
