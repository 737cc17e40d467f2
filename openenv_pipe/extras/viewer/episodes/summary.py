"""Summarise the lines of an episodes file for the episode index."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from openenv_pipe.extras.viewer.episodes.query import storable_text
from openenv_pipe.system.untrusted_text import visible
from openenv_pipe.types import Finish, Status

MAX_WORDS_LENGTH = 100_000  # characters of one episode that a text search covers
MAX_PREVIEW_LENGTH = 160
MAX_ERROR_LENGTH = 300
MAX_NAME_LENGTH = 200
MAX_TERMS = 1000


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
    terms = {_name(name): _finite(value) for name, value in row["reward_terms"].items()}
    if len(terms) > MAX_TERMS:
        raise ValueError(f"it has {len(terms):,} reward terms; expected at most {MAX_TERMS:,}")
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
            not status.is_failure and row.get("unscored") is None,
            _finite(row["reward"]),
            json.dumps(terms, allow_nan=False),
            fmean(map(_finite, advantages)) if advantages else None,
            len(turns),
            sum(_num_tokens(turn) for turn in turns),
            sum(turn["unusable"] is not None for turn in turns),
            status.is_limit or any(map(_is_cut_off, turns)),
            visible(error[:MAX_ERROR_LENGTH]) if error else None,
            visible(next((text for text in reversed(replies) if text), "")[:MAX_PREVIEW_LENGTH]),
        ),
        words=_words(row),
    )


def _name(text: str) -> str:
    return storable_text(text[:MAX_NAME_LENGTH])


def _finite(value: Any) -> float:
    """SQLite has no NaN: it stores NULL, which readers of the index do not expect."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a reward")
    return number


def _small(number: int) -> int:
    if not 0 <= number < 2**31:
        raise ValueError(f"{number!r:.40} is not the number of a member")
    return int(number)


def _num_tokens(turn: Mapping[str, Any]) -> int:
    usage = turn.get("usage")
    num_given = _small(usage["num_prompt_tokens"]) if usage else len(turn["prompt_ids"])
    return num_given + _num_sampled(turn)


def _num_sampled(turn: Mapping[str, Any]) -> int:
    usage = turn.get("usage")
    return _small(usage["num_completion_tokens"]) if usage else len(turn["completion_ids"])


def _is_cut_off(turn: Mapping[str, Any]) -> bool:
    return turn["finish"] == Finish.LENGTH and _num_sampled(turn) > 1


def _words(row: Mapping[str, Any]) -> str:
    """Join the texts that people search in, up to the limit."""
    found: list[str] = []
    _add_strings(row["error"], found)
    seen: Mapping[str, Any] = row["first_observation"]
    _add_strings(seen, found)
    for turn in row["turns"]:
        found.append(turn["reply"])
        _add_strings(turn["unusable"], found)
        for step in turn["steps"]:
            observation = step["observation"]
            for name, value in observation.items():
                if value != seen.get(name):
                    _add_strings(value, found)
            seen = observation
    _add_strings(row.get("output", ""), found)
    found += [each["explanation"] for each in row.get("judgements", {}).values()]
    return storable_text("\n".join(found)[:MAX_WORDS_LENGTH]).replace("\x00", " ")


def _add_strings(value: Any, found: list[str]) -> None:
    """Add all strings of a JSON value in order, without recursion: it may be nested deeply."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        kind = type(each)
        if kind is str:
            found.append(each)
        elif kind is dict:
            waiting.extend(reversed([*each.values()]))
        elif kind is list:
            waiting.extend(reversed(each))
