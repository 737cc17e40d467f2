"""Pictures in observations: models of text read a note in place of the base64 text of a picture."""

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

SHORTEST = 64  # characters of a base64 text that can be a picture
HEADER = 64  # characters that are decoded to find the kind and the size; a multiple of 4
DATA_URL = re.compile(r"data:image/([a-z0-9.+-]{1,20});base64,", re.IGNORECASE)
# The first bytes of a file, in base64, by kind.
SIGNATURES = {"iVBORw0KGgo": "png", "/9j/": "jpeg", "R0lGODdh": "gif", "R0lGODlh": "gif"}
BASE64 = re.compile(r"[A-Za-z0-9+/\s]+=*\s*")


def without_pictures(value: Any) -> Any:
    """Replace pictures, as data URLs or base64 of PNG, JPEG or GIF files, by notes of their sizes.

    value: anything of JSON. Lists of numbers stay as they are.
    """
    if isinstance(value, str):
        return _note(value) or value
    if isinstance(value, Mapping):
        return {name: without_pictures(each) for name, each in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], str | list | Mapping):
        return [without_pictures(each) for each in value]
    return value


def _note(text: str) -> str | None:
    """Return the note for a text that is a picture; None for other texts."""
    if len(text) < SHORTEST:
        return None
    url = DATA_URL.match(text)
    packed = text[url.end() :] if url else text
    kind = next((SIGNATURES[each] for each in SIGNATURES if packed.startswith(each)), None)
    if url is None and (kind is None or BASE64.fullmatch(packed) is None):
        return None
    size = _png_size(packed) if kind == "png" else ""
    kind = kind or (url[1].lower() if url else "")
    return f"[picture: {kind}{size}, {len(packed) * 3 // 4} bytes]"


def _png_size(packed: str) -> str:
    """Return the size that the header of a PNG file names, such as ", 64 x 48 pixels"."""
    try:
        header = base64.b64decode(packed[:HEADER])
    except binascii.Error:
        return ""
    width, height = (int.from_bytes(header[start : start + 4]) for start in (16, 20))
    return f", {width} x {height} pixels"
