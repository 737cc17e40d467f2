"""Play groups of episodes as training does, and check their rewards and leaks."""

import json
import random
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.environments.adapters.templates import BOOKKEEPING
from openenv_pipe.environments.client.metadata import ANSWER_FIELD_NAMES
from openenv_pipe.environments.client.session import Session
from openenv_pipe.extras.lab.check.rewards import (
    best_play,
    constant_line,
    ends_line,
    reward_lines,
    silence_line,
)
from openenv_pipe.extras.lab.check.seeds import is_time
from openenv_pipe.extras.lab.check.subject import EnvironmentUnderTest
from openenv_pipe.extras.lab.episodes import leaves
from openenv_pipe.types import Action, Observation

EMPTY: tuple[Any, ...] = ("", None, [], {}, 0, 0.0, False)
MAX_OTHERS = 20  # episodes with another answer that are searched to measure hits by chance
LEAK_FRACTION = 0.2  # of the episodes, above chance, from which on it counts as a leak
MAX_FIELDS = 3  # that a message names
NUM_TASKS = 16
GROUP_SIZE = 6
NUM_SESSIONS = 8
LIMIT_S = 30.0  # for each policy
Groups = Mapping[str, Sequence[Sequence[PlayedEpisode]]]  # by policy; a group has one task


def leak_lines(plays: Sequence[PlayedEpisode]) -> Iterator[Line]:
    """Report whether earlier messages have what the end reveals, and fields named like an answer.

    A revealed value is in a field of the last observation that was empty until then, and differs
    between tasks. It is searched as a whole word in earlier observations and states, but for clocks
    and ids. A value that stands as often in episodes whose end reveals another one does not count:
    that is chance, a frequent value, or a list of choices.
    """
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


async def probe_groups(subject: EnvironmentUnderTest) -> AsyncIterator[Line]:
    """Check whether rewards within groups differ, and whether answers leak before the end."""
    groups: Groups = {name: await _groups(subject, name) for name in subject.choosers}
    for line in reward_lines(groups, subject.env.success_reward):
        yield line
    silence = subject.env.max_turns * subject.unusable_reward
    if (compared := silence_line(groups["random"], silence)) is not None:
        yield compared
    plays = [play for each in groups.values() for group in each for play in group]
    if (ends := ends_line(plays, subject.env.max_turns)) is not None:
        yield ends
    if (best := best_play(groups, subject.env.success_reward)) is not None:
        subject.repeated = await _repeated(subject, best)
        yield constant_line(best, subject.repeated)
    for line in leak_lines(plays):
        yield line


async def _repeated(subject: EnvironmentUnderTest, best: PlayedEpisode) -> list[PlayedEpisode]:
    """Play the first tasks with the actions of one episode, whatever the observations are."""
    plays: list[PlayedEpisode] = []

    async def do(session: Session, index: int) -> None:
        actions = iter(best.actions)

        def choose(observations: Sequence[Observation], draw: random.Random) -> Sequence[Action]:
            return [action for action in [next(actions, None)] if action is not None]

        plays.append(await subject.play(session, index, choose))

    await subject.spread(
        range(min(NUM_TASKS, len(subject.tasks))),
        do,
        num_sessions=min(NUM_SESSIONS, subject.num_sessions),
        limit_s=LIMIT_S,
    )
    return plays


async def _groups(subject: EnvironmentUnderTest, name: str) -> list[list[PlayedEpisode]]:
    num_tasks = min(NUM_TASKS, len(subject.tasks))
    groups: list[list[PlayedEpisode]] = [[] for _ in range(num_tasks)]

    async def do(session: Session, place: tuple[int, int]) -> None:
        index, member = place
        chooser = subject.choosers[name]
        play = await subject.play(session, index, chooser, member=member, with_states=True)
        groups[index].append(play)

    await subject.spread(
        [(index, member) for index in range(num_tasks) for member in range(GROUP_SIZE)],
        do,
        num_sessions=min(NUM_SESSIONS, subject.num_sessions),
        limit_s=LIMIT_S,
    )
    return [group for group in groups if len(group) == GROUP_SIZE]
