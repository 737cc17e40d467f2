"""The templates that `env inspect` writes: which fields of an observation a model is shown.

Left out are fields that may contain the answer, bookkeeping, fields while they are empty, and what
the model has been told already: after the first message, long texts that never change, and the
earlier items of lists that only grow. Where observations have nothing but metadata, the same holds
for the fields of the metadata.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from openenv_pipe.environments.adapters.templates import BOOKKEEPING, EMPTY
from openenv_pipe.environments.client.metadata import ANSWER_FIELD_NAMES
from openenv_pipe.types import Observation

OWN_FIELDS = frozenset({"done", "reward", "metadata"})  # OpenEnv's fields of every observation
NOT_SHOWN = OWN_FIELDS | ANSWER_FIELD_NAMES | BOOKKEEPING
LONG_TEXT = 200  # characters; a shorter text is shown again although it does not change
METADATA = "{{ metadata }}"  # where nothing else is known of observations
MAX_WORDS = 20_000  # characters of a server's text

Episodes = Sequence[Sequence[Observation]]


def plain(text: str) -> str:
    """Shorten a server's text; characters that a configuration may not have become spaces."""
    return "".join(sign if sign.isprintable() or sign == "\n" else " " for sign in text[:MAX_WORDS])


def literal(text: str) -> str:
    """Return a server's text as a template that contains no expression.

    `${...}` refers to a value from elsewhere, such as an environment variable, and `{{...}}` is an
    expression of Jinja.
    """
    return re.sub(r"([{$])(?=[{%#])", r"\1 ", plain(text))


def template_of_schema(schema: Mapping[str, Any]) -> str:
    """Return a template with a line for each field of a schema, or a single field alone."""
    return _template({name: name for name in schema.get("properties", {}) if _is_shown(name)}, {})


def first_template(firsts: Sequence[Observation]) -> str:
    ((firsts,), path) = _told([firsts])
    shown = {name: path(name) for name in _names(firsts) if _is_shown(name)}
    return _template(shown, _conditions(shown, firsts))


def following_template(episodes: Episodes) -> str:
    episodes, path = _told(episodes)
    following = [observation for episode in episodes for observation in episode[1:]]
    paths = {
        name: path(name)
        for name in _names(following)
        if _is_shown(name) and not _is_repeated(name, episodes)
    }
    growths = {name: _growth(name, episodes) for name in paths}
    shown = {
        name: f"{each}[-{growths[name]}:]" if growths[name] else each
        for name, each in paths.items()
    }
    return _template(shown, _conditions(paths, following))


def is_plain(episodes: Episodes) -> bool:
    """True if the observation as JSON shows what the templates would: they leave nothing out."""
    episodes, _ = _told(episodes)
    observations = [observation for episode in episodes for observation in episode]
    return not any(
        (name not in OWN_FIELDS | BOOKKEEPING and not _is_shown(name))
        or _is_repeated(name, episodes)
        or _growth(name, episodes)
        for name in _names(observations)
    )


def _told(episodes: Episodes) -> tuple[Episodes, Callable[[str], str]]:
    """Return what a model can be shown, and the function from a field to its expression.

    This is the observations, or their metadata if they have nothing else.
    """
    observations = [observation for episode in episodes for observation in episode]
    fields = set(_names(observations)) - OWN_FIELDS - BOOKKEEPING
    if fields or not any(isinstance(each.get("metadata"), Mapping) for each in observations):
        return episodes, lambda name: name
    return [[_metadata(each) for each in episode] for episode in episodes], _path_in_metadata


def _metadata(observation: Observation) -> Observation:
    metadata = observation.get("metadata")
    return metadata if isinstance(metadata, Mapping) else {}


def _path_in_metadata(name: str) -> str:
    return f"metadata['{name}']" if hasattr(dict, name) else f"metadata.{name}"


def _is_shown(name: str) -> bool:
    return name.isidentifier() and name.lower() not in NOT_SHOWN


def _names(observations: Iterable[Observation]) -> list[str]:
    return list(dict.fromkeys(name for each in observations for name in each))


def _conditions(paths: Mapping[str, str], observations: Sequence[Observation]) -> dict[str, str]:
    """Return, for the fields that are sometimes absent or empty, when they are there.

    paths: the expressions of the fields, by name.
    """
    conditions = {}
    for name, path in paths.items():
        values = [each.get(name) for each in observations]
        tests = [f"{path} is defined"] if any(name not in each for each in observations) else []
        if tests and path != name:
            tests.insert(0, "metadata is defined")
        if any(value in EMPTY for value in values):
            # Zero and False are false, but not empty.
            is_number = any(isinstance(value, int | float) for value in values)
            tests.append(f"{path} is not none" if is_number else path)
        if tests:
            conditions[name] = " and ".join(tests)
    return conditions


def _is_repeated(name: str, episodes: Episodes) -> bool:
    """True for a long text that never changes in an episode in which something else does."""
    played = [episode for episode in episodes if len(episode) > 1 and episode[1] != episode[0]]
    return bool(played) and all(
        isinstance(each.get(name), str)
        and len(each[name]) >= LONG_TEXT
        and each[name] == episode[0].get(name)
        for episode in played
        for each in episode
    )


def _growth(name: str, episodes: Episodes) -> int:
    """Return by how many items at most a list grows in a step; 0 if it does anything but grow."""
    growths = list(_growths(name, episodes))
    grows = bool(growths) and all(each is not None for each in growths)
    return max((each or 0 for each in growths), default=0) if grows else 0


def _growths(name: str, episodes: Episodes) -> Iterator[int | None]:
    for episode in episodes:
        for before, after in pairwise(each.get(name) for each in episode):
            if isinstance(before, list) and isinstance(after, list) and before:
                yield len(after) - len(before) if after[: len(before)] == before else None
            else:
                yield None


def _template(shown: Mapping[str, str], conditions: Mapping[str, str]) -> str:
    """Return a template with a line for each expression, or a single expression alone."""
    if not shown:
        return METADATA
    if len(shown) == 1 and not conditions:
        (expression,) = shown.values()
        return f"{{{{ {expression} }}}}"
    lines = []
    for name, expression in shown.items():
        line = f"{name}: {{{{ {expression} }}}}\n"
        condition = conditions.get(name)
        lines.append(f"{{% if {condition} %}}{line}{{% endif %}}" if condition else line)
    return "".join(lines).removesuffix("\n")
