"""Tell clocks and measured durations in observations apart from what a task says."""

import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any

NAMES = re.compile(
    r"(^|_)(time|timestamp|duration|elapsed|latency|uptime|date|datetime|clock|now|seconds)(_|$)"
    r"|_(at|s|sec|secs|ms|us|ns)$"
)
# Dates with or without a time, times of day, seconds since 1970, and measured durations in a text.
TIMES = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"
    r"|\b\d\d?:\d\d:\d\d(?:[.,]\d+)?\b"
    r"|(?P<epoch>\b\d{10}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?\b)"
    r"|\b\d+\.\d+(?:e-\d+)? ?(?:ns|us|µs|ms|s|secs?|seconds)\b"
)
DAY_S = 86_400.0
MARK = "<time>"


def is_clock(path: str, value: Any, other: Any) -> bool:
    """True if the field is named like a clock, or two values differ in nothing but times."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", path.rpartition(".")[2]).lower()
    if NAMES.search(name):
        return True
    return isinstance(value, str | int | float) and _masked(value) == _masked(other)


def is_time(path: str, value: Any) -> bool:
    """True if the field is named like a clock, or the value is nothing but a time."""
    return is_clock(path, value, None) or _masked(value) == MARK


def _masked(value: Any) -> str:
    return TIMES.sub(lambda match: MARK if _is_near(match) else match[0], str(value))


def _is_near(match: re.Match[str]) -> bool:
    """Return False for a date or a Unix time that is more than a day from now, else True."""
    if match["date"]:
        today = datetime.now(UTC).date()
        return match["date"] in {str(today + timedelta(days=days)) for days in (-1, 0, 1)}
    if match["epoch"]:
        return abs(float(match["epoch"][:10]) - time.time()) < DAY_S
    return True
