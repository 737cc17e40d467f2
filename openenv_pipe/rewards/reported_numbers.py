"""Read the numbers that environments report in observations, and clients of their episodes.

They are for metrics and reward terms.

A path names a field, from the outside in: `score`, `metadata.rubric_scores.style`, `cells.0` for
the first item of a list. A field's name may contain dots itself, as that of a nested rubric does.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from openenv_pipe.system.user_numbers import MAX_REWARD
from openenv_pipe.types import Episode, Group, Observation

RUBRIC_SCORES = "metadata.rubric_scores"  # where environments with OpenEnv's rubrics report them
MAX_SCORES = 64  # of one step; each becomes a metric
METRIC_NAME = re.compile(r"[\w./ -]{1,80}", re.ASCII)  # others would not fit into a metric's name


def number_at(observation: Observation, path: str) -> float | None:
    """Return the number at a path, true as 1 and false as 0.

    None if there is no such field, or if it is not a finite number of at most MAX_REWARD in
    absolute value.
    """
    numbers = (_number(each) for each in _values_at(observation, path))
    return next((number for number in numbers if number is not None), None)


def rubric_scores(observation: Observation) -> dict[str, float]:
    """Return the scores of the environment's rubrics, by dotted name; empty if there are none."""
    scores: dict[str, float] = {}
    for each in _values_at(observation, RUBRIC_SCORES):
        for name, value in _leaves(each):
            if (number := _number(value)) is not None:
                scores.setdefault(name, number)
    return scores


def last_number(observations: Sequence[Observation], path: str) -> float | None:
    """Return the number at a path of the latest observation that has it; None if none has."""
    numbers = (number_at(each, path) for each in reversed(observations))
    return next((number for number in numbers if number is not None), None)


def last_rubric_scores(observations: Sequence[Observation]) -> dict[str, float]:
    latest: dict[str, float] = {}
    for each in observations:
        latest |= rubric_scores(each)
    return latest


def number_paths(observations: Sequence[Observation]) -> list[str]:
    """Return the paths of all numbers in the fields of observations, in their order."""
    leaves = (leaf for each in observations for leaf in _leaves(each))
    return list(dict.fromkeys(path for path, value in leaves if _number(value) is not None))


def summarise_reported(groups: Sequence[Group], fields: Mapping[str, str]) -> dict[str, float]:
    """Return the means of what the environment and clients reported, over the scored episodes.

    The latest value of an episode counts; episodes that have none are left out. `env/NAME` is the
    field that `fields` (`env.metrics`) names by its path, `rubric/NAME` the score of a rubric,
    `reported/NAME` what a client reported.
    """
    values: dict[str, list[float]] = {}
    rubrics: dict[str, list[float]] = {}
    reported: dict[str, list[float]] = {}
    for episode in (episode for group in groups for episode in group.scored):
        observations = episode.observations
        for name, path in fields.items():
            if (number := last_number(observations, path)) is not None:
                values.setdefault(f"env/{name}", []).append(number)
        for found, numbers in (
            (rubrics, last_rubric_scores(observations)),
            (reported, client_metrics(episode)),
        ):
            for name, number in numbers.items():
                if name in found or (len(found) < MAX_SCORES and METRIC_NAME.fullmatch(name)):
                    found.setdefault(name, []).append(number)
    for prefix, named in (("rubric", rubrics), ("reported", reported)):
        values |= {f"{prefix}/{name}": named[name] for name in sorted(named)}
    return {name: fmean(numbers) for name, numbers in values.items()}


def client_metrics(episode: Episode) -> dict[str, float]:
    """Return the metrics that a client reported of its episode; empty if there are none."""
    steps = [step for turn in episode.turns for step in turn.steps if step.is_report]
    reports = [step.observation["reported"] for step in steps]
    metrics = [each.get("metrics") for each in reports if isinstance(each, Mapping)]
    return {
        name: number
        for each in metrics
        if isinstance(each, Mapping)
        for name, value in each.items()
        if (number := _number(value)) is not None
    }


def _values_at(value: Any, path: str) -> Iterator[Any]:
    """Yield what the path can mean: `a.b` is the field `a.b`, or the field `b` of `a`."""
    if isinstance(value, list):
        name, _, rest = path.partition(".")
        if name.isdecimal() and len(name) < 10 and int(name) < len(value):
            inner = value[int(name)]
            yield from _values_at(inner, rest) if rest else [inner]
    if not isinstance(value, Mapping):
        return
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        if (name := ".".join(parts[:end])) in value:
            rest = ".".join(parts[end:])
            yield from _values_at(value[name], rest) if rest else [value[name]]


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float) or not abs(value) <= MAX_REWARD:  # NaN compares as False
        return None
    return float(value)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        if path:
            yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{path}.{key}" if path else str(key))
