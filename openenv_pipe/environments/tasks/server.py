"""Tasks that a server lists through OpenEnv's task API, addressed by split and index."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.http import Access, fetch
from openenv_pipe.system.untrusted_json import parse_untrusted
from openenv_pipe.system.untrusted_text import quoted

MAX_TASKS = 10**9
MAX_SPLITS = 5  # that are listed
TIME_LIMIT_S = 60.0  # A server may have to load its data first.
NOT_IMPLEMENTED = 501


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSplit:
    """A split that a server lists."""

    name: str
    kind: str  # OpenEnv calls it the type: train, validation or test; empty if not given
    num_tasks: int


class ServerRows(Sequence[Mapping[str, Any]]):
    """Row i is {split, index: i}, which is what `reset` takes for task i."""

    def __init__(self, split: str, num_tasks: int) -> None:
        self._split = split
        self._indices = range(num_tasks)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Mapping[str, Any]:  # type: ignore[override]  # no slices
        return {"split": self._split, "index": self._indices[index]}


async def server_rows(url: str, access: Access, split: str, key: str) -> ServerRows:
    """List the tasks of a split of the server at `url`.

    Raises ConfigError: The server has no task API or no such split; the message names the `key`.
    """
    path, splits = await _splits_of(url, access, key)
    if split not in splits:
        raise ConfigError(f"{key}.split={split!r}: the server has {', '.join(splits) or 'none'}")
    return ServerRows(split, await _num_tasks(url, access, key, path, split))


async def list_splits(url: str, access: Access) -> Sequence[ServerSplit]:
    """List the server's splits, up to MAX_SPLITS; none if it has no task API."""
    try:
        path, splits = await _splits_of(url, access, "tasks")
        counts = [
            await _num_tasks(url, access, "tasks", path, each) for each in [*splits][:MAX_SPLITS]
        ]
    except ConfigError:
        return []
    return [
        ServerSplit(name=name, kind=kind, num_tasks=num_tasks)
        for (name, kind), num_tasks in zip(splits.items(), counts, strict=False)
    ]


async def _splits_of(url: str, access: Access, key: str) -> tuple[str, dict[str, str]]:
    """Return the path of the server's environment, and the types of its splits by their names."""
    environments = await _answer(url, access, key, "/list_environments")
    try:
        (name,) = environments
        path = f"/{quote(name, safe='')}"
        splits = await _answer(url, access, key, f"{path}/splits")
        return path, {str(each["name"]): str(each.get("type", "")) for each in splits}
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise _unexpected(url, key, "list its environment and its splits", error) from None


async def _num_tasks(url: str, access: Access, key: str, path: str, split: str) -> int:
    """Return how many tasks a split has. path: of the server's environment."""
    answer = await _answer(url, access, key, f"{path}/num_tasks", {"split": split})
    try:
        num_tasks = int(answer["num_tasks"])
    except (TypeError, ValueError, OverflowError, LookupError) as error:
        raise _unexpected(url, key, "say how many tasks a split has", error) from None
    if not 0 <= num_tasks <= MAX_TASKS:
        raise _unexpected(url, key, f"have 0 to {MAX_TASKS} tasks", f"{num_tasks} tasks")
    return num_tasks


def _unexpected(url: str, key: str, expected: str, seen: object) -> ConfigError:
    return ConfigError(
        f"{key}.type=server: {url} does not {expected}, as OpenEnv's task API requires: "
        f"{seen!r:.200}; name the tasks by type range, file, dataset or folders"
    )


async def _answer(url: str, access: Access, key: str, path: str, body: Any = None) -> Any:
    try:
        status, content = await fetch(url, path, timeout_s=TIME_LIMIT_S, access=access, body=body)
        if status == 200:
            return parse_untrusted(content)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {url}{path} returned no list of tasks: {error}") from error
    why = "without tasks of its own" if status == NOT_IMPLEMENTED else quoted(content)
    raise ConfigError(
        f"{key}.type=server: {url}{path} answers {status} ({why}), expected 200; "
        "name the tasks by type range, file, dataset or folders"
    )
