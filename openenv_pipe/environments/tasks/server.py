"""Tasks that a server lists through OpenEnv's task API, addressed by split and index."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.http import Access, fetch

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
    (name,) = await _answer(url, access, key, "/list_environments")
    splits = await _answer(url, access, key, f"/{name}/splits")
    names = [str(each.get("name")) for each in splits]
    if split not in names:
        raise ConfigError(f"{key}.split={split!r}: the server has {', '.join(names) or 'none'}")
    counted = await _answer(url, access, key, f"/{name}/num_tasks", {"split": split})
    return ServerRows(split, int(counted["num_tasks"]))


async def _answer(url: str, access: Access, key: str, path: str, body: Any = None) -> Any:
    try:
        status, content = await fetch(url, path, timeout_s=TIME_LIMIT_S, access=access, body=body)
        if status == 200:
            return json.loads(content)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {url}{path} returned no list of tasks: {error}") from error
    why = "without tasks of its own" if status == NOT_IMPLEMENTED else f"{content[:80]!r}"
    raise ConfigError(
        f"{key}.type=server: {url}{path} answers {status} ({why}), expected 200; "
        "name the tasks by type range, file or dataset"
    )
