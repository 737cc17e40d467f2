"""Tasks that a server lists through OpenEnv's task API, addressed by split and index."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.foreign_json import parse_foreign
from openenv_pipe.system.foreign_text import quoted
from openenv_pipe.system.http import Access, fetch

MAX_TASKS = 10**9
TIME_LIMIT_S = 60.0  # A server may have to load its data first.
NOT_IMPLEMENTED = 501


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

    Raises:
        ConfigError: The server has no task API or no such split; the message names the `key`.
    """
    environments = await _answer(url, access, key, "/list_environments")
    try:
        (name,) = environments
        splits = await _answer(url, access, key, f"/{quote(name, safe='')}/splits")
        names = [str(each["name"]) for each in splits]
    except (TypeError, ValueError, LookupError) as error:
        raise _unexpected(url, key, "list its environment and its splits", error) from None
    if split not in names:
        raise ConfigError(f"{key}.split={split!r}: the server has {', '.join(names) or 'none'}")
    path = f"/{quote(name, safe='')}/num_tasks"
    try:
        num_tasks = int((await _answer(url, access, key, path, {"split": split}))["num_tasks"])
    except (TypeError, ValueError, OverflowError, LookupError) as error:
        raise _unexpected(url, key, "say how many tasks a split has", error) from None
    if not 0 <= num_tasks <= MAX_TASKS:
        raise _unexpected(url, key, f"have 0 to {MAX_TASKS} tasks", f"{num_tasks} tasks")
    return ServerRows(split, num_tasks)


def _unexpected(url: str, key: str, expected: str, seen: object) -> ConfigError:
    return ConfigError(
        f"{key}.type=server: {url} does not {expected} as OpenEnv's task API does: {seen!r:.200}; "
        "name the tasks by type range, file or dataset"
    )


async def _answer(url: str, access: Access, key: str, path: str, body: Any = None) -> Any:
    try:
        status, content = await fetch(url, path, timeout_s=TIME_LIMIT_S, access=access, body=body)
        if status == 200:
            return parse_foreign(content)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {url}{path} returned no list of tasks: {error}") from error
    why = "without tasks of its own" if status == NOT_IMPLEMENTED else quoted(content)
    raise ConfigError(
        f"{key}.type=server: {url}{path} answers {status} ({why}), expected 200; "
        "name the tasks by type range, file or dataset"
    )
