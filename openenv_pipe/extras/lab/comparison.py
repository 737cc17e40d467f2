"""What an observation tells of its task, so that the tasks of two resets can be compared."""

import re
from collections.abc import Mapping
from typing import Any

from openenv_pipe.environments.adapters.templates import BOOKKEEPING
from openenv_pipe.extras.lab.episodes import leaves
from openenv_pipe.extras.lab.times import is_time

IDS = re.compile(r"(^|_)(id|uuid|seed)$")  # names of fields
CHOICES = frozenset({"split", "index"})  # reset keywords that an environment may repeat

Told = tuple[tuple[str, str], ...]  # paths and values


def told(observation: Mapping[str, Any]) -> Told:
    """Return an observation's values without ids, seeds, metadata and values that are times."""
    return tuple(
        (path, str(value))
        for path, value in leaves({k: v for k, v in observation.items() if k != "metadata"})
        if not _is_label(path) and not is_time(path, value)
    )


def _is_label(path: str) -> bool:
    name = path.rpartition(".")[2].lower()
    return name in BOOKKEEPING or name in CHOICES or IDS.search(name) is not None
