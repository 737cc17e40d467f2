"""Whether what the end of an episode reveals could be read before: a heuristic, and what it saw.

A revealed value stands in a field of the last observation that was empty until then, and is not
the same for every task. It is looked for, as a whole word, in all that was sent before: earlier
observations and states. What the agent itself wrote does not count, nor what the answers of
other tasks show as often: that is chance, or a choice of answers.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openenv_pipe.commands.env.episodes import Play
from openenv_pipe.commands.findings import Line, Result

TELLING = {"answer", "solution", "secret", "ground_truth", "correct_answer", "expected_answer"}
EMPTY = ("", None, [], {}, 0, 0.0, False)
MOST_OTHERS = 20  # of whose answers it is counted how often they are found by chance
LEAKING = 0.2  # of the episodes, beyond chance
MOST_FIELDS = 3  # to name


def leak_lines(plays: Sequence[Play]) -> Iterator[Line]:
    """What is revealed at the end, and fields whose names say that they tell the answer."""
    yield _revealed_line([play for play in plays if play.done and len(play.results) > 1])
    if names := sorted({name for play in plays for name in _telling_fields(play)}):
        text = f"filled before the end: {', '.join(names)}; is that the answer?"
        yield Line("fields", Result.WARN, text)


def _revealed_line(plays: Sequence[Play]) -> Line:
    fields: dict[str, dict[int, str]] = {}  # by path the values of those plays that reveal it
    for number, play in enumerate(plays):
        for path, value in revealed(play).items():
            fields.setdefault(path, {})[number] = value
    fields = {path: values for path, values in fields.items() if len(set(values.values())) > 1}
    if not fields:
        text = f"the end of {len(plays)} episodes reveals nothing that could be looked for"
        return Line("leaks", Result.OK, text)
    earlier = [json.dumps(list(_sent_before(play)), ensure_ascii=False) for play in plays]
    for path, values in fields.items():
        share, by_chance = _found(values, earlier)
        if share - by_chance >= LEAKING:
            text = (
                f"`{path}`, filled at the end, could be read before in {share:.0%} of "
                f"{len(values)} episodes (by chance {by_chance:.0%}): {_where(plays, values)}"
            )
            measured = {"share": share, "by_chance": by_chance}
            return Line("leaks", Result.FAIL, text, measured)
    text = f"{', '.join(fields)}: filled at the end, not found before ({len(plays)} episodes)"
    return Line("leaks", Result.OK, text)


def revealed(play: Play) -> dict[str, str]:
    """Values of the last observation in fields that were empty until then, by path."""
    before: set[str] = set()
    for observation in play.observations[:-1]:
        before |= {path for path, value in _leaves(observation) if value not in EMPTY}
    written = json.dumps(play.actions, ensure_ascii=False).lower()
    return {
        path: str(value)
        for path, value in _leaves(play.observations[-1])
        if path not in before
        and value not in EMPTY
        and isinstance(value, str | int | float)
        and not _has_word(written, str(value).lower())
    }


def _found(values: Mapping[int, str], earlier: Sequence[str]) -> tuple[float, float]:
    """In what share of the episodes its own value was there before, and those of others."""
    own = [_has_word(earlier[number], value) for number, value in values.items()]
    others = [
        _has_word(earlier[number], other)
        for number, value in values.items()
        for other in sorted(set(values.values()) - {value})[:MOST_OTHERS]
    ]
    return sum(own) / len(own), sum(others) / len(others)


def _where(plays: Sequence[Play], values: Mapping[int, str]) -> str:
    """The fields of earlier observations and states in which the values stand."""
    fields = {
        f"{kind}.{path}"
        for number, value in values.items()
        for kind, seen in _sent_before(plays[number])
        for path, leaf in _leaves(seen)
        if _has_word(str(leaf), value)
    }
    return ", ".join(sorted(fields)[:MOST_FIELDS])


def _sent_before(play: Play) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All observations and states of a play but those of its end."""
    for result in play.results:
        if not result.done:
            yield "observation", result.observation
    for state in play.states:
        yield "state", state


def _has_word(text: str, value: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


def _telling_fields(play: Play) -> Iterator[str]:
    for kind, seen in _sent_before(play):
        for path, value in _leaves(seen):
            if path.rpartition(".")[2].lower() in TELLING and value not in EMPTY:
                yield f"{kind}.{path}"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All values that are no containers, with the path to each; items of a list share one."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, f"{path}[]")
    else:
        yield path, value
