"""Responses on disk, so that the same request is paid for once.

The key is a digest of the address and the body, without headers and therefore without secrets.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openenv_pipe.errors import ConfigError


class ResponseCache:
    """A folder with a file for each response. Files are replaced atomically."""

    def __init__(self, folder: Path) -> None:
        """Make the folder. Raises ConfigError if it cannot be made."""
        self._folder = folder.expanduser()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"engine.cache_dir={folder} cannot be used: {error}; name a folder that can be "
                "written, or null for no cache"
            ) from error

    def read(self, url: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the response to this request, or None; a file that is no JSON counts as none."""
        try:
            return json.loads(self._path(url, body).read_bytes())
        except (OSError, ValueError):
            return None

    def write(self, url: str, body: Mapping[str, Any], response: Mapping[str, Any]) -> None:
        """Keep a response. Raises OSError."""
        path = self._path(url, body)
        path.parent.mkdir(exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(response, file)
        Path(aside).replace(path)

    def _path(self, url: str, body: Mapping[str, Any]) -> Path:
        request = json.dumps([url, body], sort_keys=True)
        digest = hashlib.sha256(request.encode(errors="replace")).hexdigest()
        return self._folder / digest[:2] / f"{digest}.json"
