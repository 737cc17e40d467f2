"""Queries of the episode index: what is asked for, what is returned, and the SQL between them."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TRAIN = "train"  # the source of training episodes; that of an evaluation is eval/<its label>
Order = Literal["step", "reward", "turns", "tokens", "advantage"]
ORDERS: Mapping[Order, str] = {
    "step": "step",
    "reward": "reward",
    "turns": "num_turns",
    "tokens": "num_tokens",
    "advantage": "advantage",
}
# The columns of an episode, and what converts their values to the right type.
COLUMNS: Mapping[str, Callable[[Any], Any]] = {
    "source": str,
    "step": lambda value: None if value is None else int(value),
    "line": int,
    "group_id": str,
    "member": int,
    "task": str,
    "status": str,
    "success": bool,
    "is_scored": bool,
    "reward": lambda value: None if value is None else float(value),
    "terms": lambda value: {str(name): float(each) for name, each in json.loads(value).items()},
    "advantage": lambda value: None if value is None else float(value),
    "num_turns": int,
    "num_tokens": int,
    "num_unusable": int,
    "is_truncated": bool,
    "error": lambda value: None if value is None else str(value),
    "preview": str,
}
MAX_STEP = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeFilter:
    """Which episodes are asked for. None: no condition."""

    source: str | None = None  # TRAIN, or eval/<label>
    first_step: int | None = None
    last_step: int | None = None
    task: str | None = None  # a part of the task's id
    task_id: str | None = None  # the whole of it
    group: str | None = None
    status: str | None = None
    success: bool | None = None
    is_scored: bool | None = None  # False: failed, or without a reward
    is_truncated: bool | None = None
    has_unusable: bool | None = None  # whether a reply could not be used, as with a tool error
    # The term that the next ones bound, of scored episodes; None: the whole reward.
    reward_term: str | None = None
    reward_from: float | None = None  # included
    reward_below: float | None = None  # not included
    reward_to: float | None = None  # included
    text: str | None = None  # words in a row, the last of which may be the beginning of one


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedEpisode:
    source: str
    step: int | None  # of training; None: of an evaluation
    line: int  # from 1 on
    group_id: str
    member: int
    task: str
    status: str
    success: bool
    is_scored: bool
    reward: float | None  # None: it is not scored
    terms: Mapping[str, float] = field(default_factory=dict)
    advantage: float | None  # the mean over its turns; None: it was not trained on
    num_turns: int
    num_tokens: int
    num_unusable: int  # replies that could not be used
    is_truncated: bool
    error: str | None
    preview: str  # the beginning of its last reply


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """Numbers of episodes in bins of equal width; the last bin includes its upper bound."""

    low: float
    high: float
    counts: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The values that the episodes of one source have, for menus."""

    sources: dict[str, int]  # numbers of episodes
    statuses: dict[str, int]
    terms: list[str]
    num_steps: int
    last_step: int | None
    problems: list[str]  # files that could not be read, as sentences


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSummary:
    """The episodes of one task. Means are over scored episodes; None without any."""

    task: str
    num_episodes: int
    reward: float | None
    success: float | None


def condition(wanted: EpisodeFilter) -> tuple[str, list[Any]]:
    """Return an SQL condition for the table `episodes`, and its parameters.

    For a text, the temporary table `matches` has to hold what `phrase_of` finds.
    """
    value, names = reward_expression(wanted.reward_term)
    parts: list[tuple[str, list[Any]]] = []
    for sql, parameter in (
        ("source = ?", wanted.source),
        ("step >= ?", wanted.first_step),
        ("step <= ?", wanted.last_step),
        ("task = ?", wanted.task_id),
        ("group_id = ?", wanted.group),
        ("status = ?", wanted.status),
        ("success = ?", wanted.success),
        ("is_scored = ?", wanted.is_scored),
        ("is_truncated = ?", wanted.is_truncated),
        ("(num_unusable > 0) = ?", wanted.has_unusable),
        ("instr(task, ?) > 0", wanted.task),
    ):
        if parameter is not None:
            parts.append((sql, [_storable(parameter)]))
    for sign, bound in (
        (">=", wanted.reward_from),
        ("<", wanted.reward_below),
        ("<=", wanted.reward_to),
    ):
        if bound is not None:
            parts.append((f"is_scored AND {value} {sign} ?", [*names, bound]))
    if phrase_of(wanted) is not None:
        parts.append(("id IN (SELECT id FROM temp.matches)", []))
    return " AND ".join(sql for sql, _ in parts) or "1", [
        each for _, many in parts for each in many
    ]


def reward_expression(term: str | None) -> tuple[str, list[Any]]:
    """Return the SQL of the whole reward or of one term, and its parameters."""
    if term is None:
        return "reward", []
    return "(SELECT value FROM json_each(terms) WHERE key = ?)", [storable_text(term)]


def as_episode(row: tuple[Any, ...]) -> IndexedEpisode:
    """Return a row of COLUMNS as an object.

    Raises TypeError, ValueError, AttributeError or OverflowError if its values are of other types.
    """
    values = zip(COLUMNS.items(), row, strict=True)
    return IndexedEpisode(**{name: kind(value) for (name, kind), value in values})


def storable_text(text: str) -> str:
    """Write out lone surrogates, which SQLite cannot store."""
    return text.encode(errors="backslashreplace").decode()


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return storable_text(value)
    return min(max(value, -MAX_STEP), MAX_STEP)


def counted_table(wanted: EpisodeFilter) -> str:
    """Return what to count in: where few episodes match a text, their rows alone are read."""
    found = phrase_of(wanted) is not None
    return "temp.matches CROSS JOIN episodes USING (id)" if found else "episodes"


def phrase_of(wanted: EpisodeFilter) -> str | None:
    """Return the FTS5 query for the words of a filter, whatever signs it has; None without text."""
    if wanted.text is None or not wanted.text.strip():
        return None
    words = re.findall(r"\w+", storable_text(wanted.text).replace("\x00", " "))
    return f'"{" ".join(words)}"*' if words else '""'
