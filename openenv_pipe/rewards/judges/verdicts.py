"""The judge's answers on disk, so that each is paid for once, also by a resumed run.

There is one file for each request. Its name is the digest of the endpoint's address and of the
request, which has the judge's model, the prompt and the episodes. The file has the endpoint's whole
answer, or why there was none.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from openenv_pipe.errors import RunFolderError
from openenv_pipe.system.files import read_json
from openenv_pipe.system.response_cache import ResponseCache

KEY = "the folder of verdicts"  # for error messages
FAILED = "failed"  # the key of why there was no answer


class Verdicts:
    """The answers in a folder, and in folders of other runs that are only read."""

    def __init__(self, folder: Path, others: tuple[Path, ...] = ()) -> None:
        """Make the folder. Raises ConfigError if that is not possible."""
        self._folder = folder
        self._own = ResponseCache(folder, KEY)
        self._others = [ResponseCache(other, KEY) for other in others if other.is_dir()]

    def read(self, url: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the answer to this request, or None."""
        for cache in (self._own, *self._others):
            if (known := cache.read(url, body)) is not None:
                return known
        return None

    def write(self, url: str, body: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        """Keep an answer. Raises OSError."""
        self._own.write(url, body, answer)

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield the answers that this folder's run has paid for; damaged files are left out."""
        for path in sorted(self._folder.glob("*/*.json")):
            try:
                answer = read_json(path)
            except RunFolderError:
                continue
            if isinstance(answer, dict) and FAILED not in answer:
                yield answer
