"""Markdown tables, and intervals as text."""

from collections.abc import Sequence

from openenv_pipe.system.intervals import Interval
from openenv_pipe.system.untrusted_text import visible

UNKNOWN = "–"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table; bars and line ends inside cells are escaped."""
    lines = [titles, ["---"] * len(titles), *rows]
    cells = (
        [visible(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def interval_text(interval: Interval | None, *, percent: bool = False) -> str:
    """Format as `mean [low, high]`."""
    if interval is None:
        return UNKNOWN
    form = "{:.0%}" if percent else "{:.2f}"
    if interval.low is None or interval.high is None:
        return form.format(interval.mean)
    mean, low, high = (form.format(x) for x in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"
