"""Check whether earlier messages contain what the end of an episode reveals (a heuristic).

A revealed value is in a field of the last observation that was empty until then, and differs
between tasks. It is searched as a whole word in everything sent before: observations and states.
What the agent wrote does not count, nor do clocks and ids. Neither does a value that stands as
often in episodes whose end reveals another one: that is chance, a frequent value, or a list of
choices.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.environments.adapters.templates import BOOKKEEPING
from openenv_pipe.environments.client.metadata import ANSWER_FIELD_NAMES
from openenv_pipe.extras.lab.check.clocks import is_time
from openenv_pipe.extras.lab.episodes import leaves

EMPTY: tuple[Any, ...] = ("", None, [], {}, 0, 0.0, False)
MAX_OTHERS = 20  # episodes with another answer that are searched to measure hits by chance
LEAK_FRACTION = 0.2  # of the episodes, above chance, from which on it counts as a leak
MAX_FIELDS = 3  # that a message names


def leak_lines(plays: Sequence[PlayedEpisode]) -> Iterator[Line]:
    """Report what is revealed at the end, and fields that are named like an answer."""
    yield _revealed_line([play for play in plays if play.done and len(play.results) > 1])
    if names := sorted({name for play in plays for name in _answer_fields(play)}):
        text = f"filled before the end: {', '.join(names)}; is that the answer?"
        yield Line("fields", Result.WARN, text)


def _revealed_line(plays: Sequence[PlayedEpisode]) -> Line:
    if not plays:
        return Line("leaks", Result.WARN, "not tested: no episode of several turns ended")
    fields: dict[str, dict[int, str]] = {}  # path -> episode number -> revealed value
    for number, play in enumerate(plays):
        for path, value in revealed(play).items():
            fields.setdefault(path, {})[number] = value
    fields = {path: values for path, values in fields.items() if len(set(values.values())) > 1}
    # Beside an answer, an end may repeat words of the question, which are no answer.
    answers = {path: values for path, values in fields.items() if _names_answer(path)}
    fields = answers or fields
    if not fields:
        text = f"the end of {len(plays)} episodes reveals nothing that could be searched for"
        return Line("leaks", Result.OK, text)
    earlier = [json.dumps(list(_sent_before(play)), ensure_ascii=False) for play in plays]
    for path, values in fields.items():
        share, by_chance = _found(values, earlier)
        if share - by_chance >= LEAK_FRACTION:
            text = (
                f"`{path}`, filled at the end, could be read before in {share:.0%} of "
                f"{len(values)} episodes (by chance {by_chance:.0%}): {_where(plays, values)}"
            )
            measured = {"share": share, "by_chance": by_chance}
            return Line("leaks", Result.FAIL, text, measured)
    text = f"{', '.join(fields)}: filled at the end, not found before ({len(plays)} episodes)"
    return Line("leaks", Result.OK, text)


def revealed(play: PlayedEpisode) -> dict[str, str]:
    """Return the values of the last observation in fields that were empty until then, by path."""
    before: set[str] = set()
    for observation in play.observations[:-1]:
        before |= {path for path, value in leaves(observation) if value not in EMPTY}
    written = json.dumps(play.actions, ensure_ascii=False).lower()
    return {
        path: str(value)
        for path, value in leaves(play.observations[-1])
        if path not in before
        and value not in EMPTY
        and isinstance(value, str | int | float)
        and path.rpartition(".")[2] not in BOOKKEEPING
        and not is_time(path, value)
        and not _has_word(written, str(value).lower())
    }


def _found(values: Mapping[int, str], earlier: Sequence[str]) -> tuple[float, float]:
    """Return how often episodes contain their value before the end, and how often others do.

    Both are means over the episodes; of the others, those whose end reveals another value.
    """
    own = [_has_word(earlier[number], value) for number, value in values.items()]
    by_chance = []
    for value in values.values():
        others = [number for number, other in values.items() if other != value]
        searched = others[:: 1 + len(others) // MAX_OTHERS]
        by_chance.append(fmean(_has_word(earlier[number], value) for number in searched))
    return fmean(own), fmean(by_chance)


def _where(plays: Sequence[PlayedEpisode], values: Mapping[int, str]) -> str:
    """Name the fields of earlier observations and states that contain the values."""
    fields = {
        f"{kind}.{path}"
        for number, value in values.items()
        for kind, seen in _sent_before(plays[number])
        for path, leaf in leaves(seen)
        if _has_word(str(leaf), value)
    }
    return ", ".join(sorted(fields)[:MAX_FIELDS])


def _sent_before(play: PlayedEpisode) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield all observations and states except those of the end."""
    for result in play.results:
        if not result.done:
            yield "observation", result.observation
    for state in play.states:
        yield "state", state


def _has_word(text: str, value: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


def _answer_fields(play: PlayedEpisode) -> Iterator[str]:
    for kind, seen in _sent_before(play):
        for path, value in leaves(seen):
            if _names_answer(path) and value not in EMPTY:
                yield f"{kind}.{path}"


def _names_answer(path: str) -> bool:
    return path.rpartition(".")[2].lower() in ANSWER_FIELD_NAMES
