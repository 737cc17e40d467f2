"""Check whether a model could read the answer before it has to give it.

The answer is what the end of an episode reveals, or what an expert replies.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.environments.adapters.templates import BOOKKEEPING
from openenv_pipe.environments.client.metadata import ANSWER_FIELD_NAMES
from openenv_pipe.environments.client.session import Session
from openenv_pipe.extras.lab.check.subject import EnvironmentUnderTest
from openenv_pipe.extras.lab.episodes import leaves
from openenv_pipe.extras.lab.times import is_time

Revealed = tuple[str, ...]  # the values of a field: several of a list
Seen = Mapping[str, str]  # by the field of observations: its values before a reply
EMPTY: tuple[Any, ...] = ("", None, [], {}, 0, 0.0, False)
MAX_OTHERS = 20  # episodes with another answer that are searched to measure hits by chance
LEAK_FRACTION = 0.2  # of the episodes, above chance, from which on it counts as a leak
MAX_FIELDS = 3  # that a message names
EXPERT_NAME = "leaks, expert"  # of a line
MIN_REPLIES, MAX_REPLIES = 8, 200  # that are searched for
NO_EXPERT = (
    "nor were replies of an expert searched for, which needs a deterministic one in env.baselines "
    f"that gives at least {MIN_REPLIES} replies, not all alike, earns much more than random "
    "actions, and calls no tools"
)
MUCH = 0.5  # of what success earns above random actions: an expert has to earn at least this part
TOLD_FRACTION = 0.5  # of an expert's replies, above chance, from which on a field gives them away
NUM_TASKS = 16
LIMIT_S = 15.0


def leak_lines(plays: Sequence[PlayedEpisode], expert: Line | None = None) -> Iterator[Line]:
    """Report whether earlier messages have what the end reveals, and fields named like an answer.

    A revealed value is in a field of the last observation that was empty until then; it differs
    between tasks, and is no clock or id. It is searched for as a whole word in earlier observations
    and states. A value that stands as often in episodes whose end reveals another one does not
    count: that is chance, a frequent value, or a list of choices.

    expert: what an expert's replies have shown, which is enough if no end reveals anything.
    """
    revealing = _revealed_line([play for play in plays if play.done and len(play.results) > 1])
    if isinstance(revealing, Line):
        yield revealing
    elif expert is None:
        yield Line("leaks", Result.WARN, f"not tested: {revealing}; {NO_EXPERT}")
    if expert is not None:
        yield expert
    if names := sorted({name for play in plays for name in _answer_fields(play)}):
        text = f"filled before the end: {', '.join(names)}; is that the answer?"
        yield Line("fields", Result.WARN, text)


def _revealed_line(plays: Sequence[PlayedEpisode]) -> Line | str:
    """Search for what the ends reveal; if there is nothing, return why."""
    if not plays:
        return "no episode of several turns ended"
    fields: dict[str, dict[int, Revealed]] = {}  # path -> episode number -> revealed values
    for number, play in enumerate(plays):
        for path, value in revealed(play).items():
            fields.setdefault(path, {})[number] = value
    fields = {path: values for path, values in fields.items() if len(set(values.values())) > 1}
    # Beside an answer, an end may repeat words of the question, which are no answer.
    answers = {path: values for path, values in fields.items() if _names_answer(path)}
    fields = answers or fields
    if not fields:
        return f"the end of {len(plays)} episodes reveals nothing that could be searched for"
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


def revealed(play: PlayedEpisode) -> dict[str, Revealed]:
    """Return the values of the last observation in fields that were empty until then, by path."""
    found: dict[str, Revealed] = {}
    before: set[str] = set()
    for observation in play.observations[:-1]:
        before |= {path for path, value in leaves(observation) if value not in EMPTY}
    written = json.dumps(play.actions, ensure_ascii=False).lower()
    for path, value in leaves(play.observations[-1]):
        if (
            path not in before
            and value not in EMPTY
            and isinstance(value, str | int | float)
            and path.rpartition(".")[2] not in BOOKKEEPING
            and not is_time(path, value)
            and not _has_word(written, str(value).lower())
        ):
            found[path] = (*found.get(path, ()), str(value))
    return found


def _found(values: Mapping[int, Revealed], earlier: Sequence[str]) -> tuple[float, float]:
    """Return how often values stand in their own episode before its end, and how often in others.

    Both are means over the episodes; the others are those whose end reveals other values. Of a
    list, all values have to be there: some may be public, such as one of a dealer's cards.
    """
    own = [_has_words(earlier[number], value) for number, value in values.items()]
    by_chance = []
    for value in values.values():
        others = [number for number, other in values.items() if other != value]
        searched = others[:: 1 + len(others) // MAX_OTHERS]
        by_chance.append(fmean(_has_words(earlier[number], value) for number in searched))
    return fmean(own), fmean(by_chance)


def _where(plays: Sequence[PlayedEpisode], values: Mapping[int, Revealed]) -> str:
    """Name the fields of earlier observations and states that contain the values."""
    fields = {
        f"{kind}.{path}"
        for number, revealed_values in values.items()
        for kind, seen in _sent_before(plays[number])
        for path, leaf in leaves(seen)
        if any(_has_word(str(leaf), value) for value in revealed_values)
    }
    return ", ".join(sorted(fields)[:MAX_FIELDS])


def _sent_before(play: PlayedEpisode) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield all observations and states except those of the end."""
    for result in play.results:
        if not result.done:
            yield "observation", result.observation
    for state in play.states:
        yield "state", state


def _has_words(text: str, values: Revealed) -> bool:
    return all(_has_word(text, value) for value in values)


def _has_word(text: str, value: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


def _answer_fields(play: PlayedEpisode) -> Iterator[str]:
    for kind, seen in _sent_before(play):
        for path, value in leaves(seen):
            if _names_answer(path) and value not in EMPTY:
                yield f"{kind}.{path}"


def _names_answer(path: str) -> bool:
    return path.rpartition(".")[2].lower() in ANSWER_FIELD_NAMES


async def expert_line(
    subject: EnvironmentUnderTest, random_groups: Sequence[Sequence[PlayedEpisode]]
) -> Line | None:
    """Search for an expert's replies in the observations before them.

    None if there is no expert that earns much more than random actions, it plays a task in several
    ways, or it calls tools, whose arguments come from observations.

    Raises ConfigError and SessionError.
    """
    if subject.env.adapter.type == "tool" or (found := await subject.expert()) is None:
        return None
    player, chooser = found
    played: dict[tuple[int, int], PlayedEpisode] = {}

    async def do(session: Session, place: tuple[int, int]) -> None:
        index, member = place
        played[place] = await subject.play(session, index, chooser, member=member)

    indices = range(min(NUM_TASKS, len(subject.tasks)))
    await subject.spread(product(indices, (0, 1)), do, limit_s=LIMIT_S)
    pairs = [
        (played[index, 0], played[index, 1])
        for index in indices
        if {(index, 0), (index, 1)} <= played.keys()
    ]
    if any(play.actions != again.actions for play, again in pairs):
        return None
    plays = [play for play, _ in pairs if not play.rejections]
    others = [play.reward for group in random_groups for play in group if play.failure is None]
    by_chance = fmean(others or [0.0])
    needed = by_chance + MUCH * (subject.env.success_reward - by_chance)
    if not plays or needed <= by_chance or fmean(play.reward for play in plays) < needed:
        return None
    return told_line(plays, player)


def told_line(plays: Sequence[PlayedEpisode], player: str) -> Line | None:
    """Say whether a field of observations reveals the replies after it; None: too few replies.

    A reply that stands as often before other replies is there by chance, or as a legal move.
    """
    num_searched = 0
    for path, every in _replies(plays).items():
        kept = every[:: 1 + len(every) // MAX_REPLIES]
        values = {number: (reply,) for number, (reply, _) in enumerate(kept)}
        if len(values) < MIN_REPLIES or len(set(values.values())) < 2:
            continue
        num_searched += len(values)
        for field in sorted({field for _, seen in kept for field in seen}):
            share, by_chance = _found(values, [seen.get(field, "") for _, seen in kept])
            if share - by_chance >= TOLD_FRACTION:
                text = (
                    f"observation.{field} shows the `{path}` of {player} before the reply, in "
                    f"{share:.0%} of {len(values)} replies (by chance {by_chance:.0%}): unless "
                    "the task is to copy it, the observation gives the answer away"
                )
                measured = {"share": share, "by_chance": by_chance}
                return Line(EXPERT_NAME, Result.WARN, text, measured)
    if not num_searched:
        return None
    text = f"{num_searched} replies of {player}: no field of an earlier observation reveals them"
    return Line(EXPERT_NAME, Result.OK, text)


def _replies(plays: Sequence[PlayedEpisode]) -> Mapping[str, Sequence[tuple[str, Seen]]]:
    """Return the values of each field of the actions, with what was seen before each.

    Values that an episode has written before are left out, because observations may repeat them.
    """
    replies: dict[str, list[tuple[str, Seen]]] = defaultdict(list)
    for play in plays:
        seen, written = dict[str, str](), set[str]()
        for observation, action in zip(play.observations, play.actions, strict=False):
            for path, value in leaves(observation):
                seen[path] = f"{seen.get(path, '')}{value}\n"
            for path, value in leaves(action):
                reply = str(value).strip() if type(value) in (str, int, float) else ""
                if reply and reply not in written:
                    replies[path].append((reply, dict(seen)))
                    written.add(reply)
    return replies
