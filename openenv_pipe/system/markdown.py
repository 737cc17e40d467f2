"""Markdown tables, and shares and intervals as text."""

from collections.abc import Sequence

from openenv_pipe.system.intervals import Interval
from openenv_pipe.system.untrusted_text import visible

UNKNOWN = "–"
MAX_DIGITS = 3  # of a percentage that would read as 0% or 100%


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table; bars and line ends inside cells are escaped."""
    lines = [titles, ["---"] * len(titles), *rows]
    cells = (
        [visible(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def percent_text(share: float) -> str:
    """Format a share as a percentage, with digits where it would else read as 0% or 100%.

    So 199 of 200 is 99.5%. Shares that differ from 0 or 1 only by rounding errors get none.
    """
    for digits in range(MAX_DIGITS + 1):
        text = f"{share:.{digits}%}"
        if share in (0.0, 1.0) or float(text[:-1]) not in (0.0, 100.0):
            return text
    return f"{share:.0%}"


def interval_text(interval: Interval | None, *, percent: bool = False) -> str:
    """Format as `mean [low, high]`."""
    if interval is None:
        return UNKNOWN
    form = percent_text if percent else "{:.2f}".format
    if interval.low is None or interval.high is None:
        return form(interval.mean)
    mean, low, high = (form(x) for x in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"
