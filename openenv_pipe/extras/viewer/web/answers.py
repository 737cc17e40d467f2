"""JSON answers: text of others is made visible, and numbers that JSON lacks become null."""

import json
import math
from typing import Any

from starlette.responses import Response

from openenv_pipe.system.untrusted_text import visible


class Answer(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return as_json(content).encode()


def as_json(value: Any) -> str:
    """Return JSON in ASCII, in which no text can control or reorder what a page shows."""
    return json.dumps(_clean(value), allow_nan=False, separators=(",", ":"))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else visible(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {visible(str(key)): _clean(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(each) for each in value]
    return value
