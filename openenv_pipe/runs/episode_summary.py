"""Summarise the lines of an episodes file for the episode index."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from openenv_pipe.runs.episode_query import storable_text
from openenv_pipe.system.foreign_text import visible
from openenv_pipe.types import Finish, Status

MAX_WORDS_LENGTH = 100_000  # characters of one episode that a text search covers
MAX_PREVIEW_LENGTH = 160
MAX_ERROR_LENGTH = 300
MAX_NAME_LENGTH = 200
LIMITS = (Status.TURN_LIMIT, Status.TOKEN_LIMIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The values of one episode's row in the index, and its text for the search."""

    values: tuple[Any, ...]  # of COLUMNS from `group_id` on
    words: str


def summarise_row(row: Mapping[str, Any]) -> Summary:
    """Summarise one line of an episodes file.

    Raises LookupError, TypeError, ValueError, AttributeError or OverflowError if it is damaged.
    """
    turns = row["turns"]
    status = Status(row["status"])
    terms = {_name(name): float(value) for name, value in row["reward_terms"].items()}
    advantages = row.get("advantages")
    replies = [turn["reply"] for turn in turns]
    error = row["error"] or row.get("unscored")
    return Summary(
        values=(
            _name(row["group"]),
            _small(row["member"]),
            _name(row["task"]["id"]),
            str(status),
            bool(row["success"]),
            status is not Status.ERROR and row.get("unscored") is None,
            float(row["reward"]),
            json.dumps(terms, allow_nan=False),
            fmean(map(float, advantages)) if advantages else None,
            len(turns),
            sum(_num_tokens(turn) for turn in turns),
            sum(turn["unusable"] is not None for turn in turns),
            status in LIMITS or any(turn["finish"] == Finish.LENGTH for turn in turns),
            visible(error[:MAX_ERROR_LENGTH]) if error else None,
            visible(next((text for text in reversed(replies) if text), "")[:MAX_PREVIEW_LENGTH]),
        ),
        words=_words(row),
    )


def _name(text: str) -> str:
    return storable_text(text[:MAX_NAME_LENGTH])


def _small(number: int) -> int:
    if not 0 <= number < 2**31:
        raise ValueError(f"{number!r:.40} is not the number of a member")
    return int(number)


def _num_tokens(turn: Mapping[str, Any]) -> int:
    if usage := turn.get("usage"):
        return _small(usage["num_prompt_tokens"]) + _small(usage["num_completion_tokens"])
    return len(turn["prompt_ids"]) + len(turn["completion_ids"])


def _words(row: Mapping[str, Any]) -> str:
    """Join the texts that people search in, up to the limit."""
    found, length = [], 0
    for text in _texts(row):
        found.append(text[: MAX_WORDS_LENGTH - length])
        length += len(found[-1])
        if length >= MAX_WORDS_LENGTH:
            break
    return storable_text("\n".join(found)).replace("\x00", " ")


def _texts(row: Mapping[str, Any]) -> Iterator[str]:
    yield from _strings(row["error"])
    yield from _strings(row["first_observation"])
    for turn in row["turns"]:
        yield turn["reply"]
        yield from _strings(turn["unusable"])
        for step in turn["steps"]:
            yield from _strings(step["observation"])
    for each in row.get("judgements", {}).values():
        yield each["explanation"]


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings of a JSON value in order, without recursion: it may be nested deeply."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            waiting.extend(reversed([*each.values()]))
        elif isinstance(each, list):
            waiting.extend(reversed(each))
