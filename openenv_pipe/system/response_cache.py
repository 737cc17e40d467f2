"""Responses on disk, so that the same request is paid for once.

The key is a digest of the address and the body, without headers and therefore without secrets.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from openenv_pipe.errors import ConfigError
from openenv_pipe.system.files import write_text


class ResponseCache:
    """A folder with a file for each response. Files are replaced atomically."""

    def __init__(self, folder: Path, key: str) -> None:
        """Make the folder. Raises ConfigError, which names the key, if that is not possible."""
        self._folder = folder.expanduser()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{key}={folder} cannot be used: {error}; expected a folder that can be written"
            ) from error

    def read(self, url: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the response to this request, or None; a damaged file counts as none."""
        try:
            response = json.loads(self._path(url, body).read_bytes())
        except (OSError, ValueError):
            return None
        return response if isinstance(response, dict) else None

    def write(self, url: str, body: Mapping[str, Any], response: Mapping[str, Any]) -> None:
        """Keep a response. Raises OSError."""
        path = self._path(url, body)
        path.parent.mkdir(exist_ok=True)
        write_text(path, json.dumps(response))

    def set_aside(self, url: str, body: Mapping[str, Any]) -> None:
        """Rename the file of a response, if there is one, so that `read` no longer finds it.

        Raises OSError.
        """
        path = self._path(url, body)
        number = len(list(path.parent.glob(f"{path.stem}.*")))
        with suppress(FileNotFoundError):
            path.rename(path.with_suffix(f".{number}.json"))

    def _path(self, url: str, body: Mapping[str, Any]) -> Path:
        request = json.dumps([url, body], sort_keys=True)
        digest = hashlib.sha256(request.encode(errors="replace")).hexdigest()
        return self._folder / digest[:2] / f"{digest}.json"
