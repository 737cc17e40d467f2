"""Find images in observations, and replace each by a small reference.

An image arrives as rows of pixels (numbers of 0..255), as the base64 text of a PNG, JPEG, GIF or
WebP file, or as a data URL of one. Everything that reads observations sees an `Image` instead,
which is written to episode files by its name.
"""

import binascii
import hashlib
import io
import math
import re
from asyncio import to_thread
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from openenv_pipe.system.copies import ATOMS
from openenv_pipe.system.files import read_bytes
from openenv_pipe.types import Image

MIN_SIDE = 32  # rows and columns; smaller arrays are boards, which models read as numbers
MAX_ON_BOARDS = 15  # an array of rows whose numbers are at most this is a board, of any size
MAX_PIXELS = 2**23  # of one image: a little more than 4K
MAX_IMAGES = 64  # of one observation; the others stay as they are
ENOUGH_PIXELS = 2 * MAX_PIXELS  # of one observation, after which no further image is read
MIN_TEXT_LENGTH = 64  # characters of a base64 text that can be an image
DATA_URL = re.compile(r"data:image/([a-z0-9.+-]{1,20});base64,", re.IGNORECASE)
# How a file's base64 text begins, with Pillow's name of the format. A WebP file begins with "RIFF",
# its size in four bytes, and "WEBP".
SIGNATURES = {
    re.compile("iVBORw0KGgo"): "PNG",
    re.compile("/9j/"): "JPEG",
    re.compile("R0lGOD[dl]h"): "GIF",
    re.compile("UklGR.{6}XRUJQ"): "WEBP",
}
GRAY_MODES = ("1", "L", "LA")
NAME_LENGTH = 32  # hexadecimal digits
KEYS_OF_REFERENCE = {"image", "width", "height"}
REFERENCE = re.compile(rf"images/([0-9a-f]{{{NAME_LENGTH}}})\.png")
COMPRESSION = 3  # zlib's level: level 6 takes twice as long to save a tenth


async def with_references(observation: dict[str, Any]) -> dict[str, Any]:
    """Return the observation with an `Image` in place of each image.

    What looks like an image and cannot be read, or is too large, stays as it is.
    """
    if not _may_have_images(observation):
        return observation
    found: dict[str, Any] = await to_thread(_Reader().read, observation)  # decoding takes long
    return found


def reference_of(value: Any) -> str | None:
    """Return the name of the file that a reference in an observation names; None for others."""
    if not isinstance(value, Mapping) or len(value) != 3 or value.keys() != KEYS_OF_REFERENCE:
        return None
    path, width, height = value["image"], value["width"], value["height"]
    match = REFERENCE.fullmatch(path) if isinstance(path, str) else None
    return match[1] if match and type(width) is int and type(height) is int else None


def replace_references(value: Any, replace: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Return the value with `replace(reference)` in place of each reference to an image."""
    if type(value) in ATOMS:
        return value
    if isinstance(value, Mapping):
        if reference_of(value) is not None:
            return replace(value)
        return {name: replace_references(each, replace) for name, each in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], str | list | Mapping):
        return [replace_references(each, replace) for each in value]
    return value


def find_references(value: Any) -> list[Mapping[str, Any]]:
    """Return the references to images in a value, in order."""
    found: list[Mapping[str, Any]] = []
    replace_references(value, found.append)
    return found


def opened(reference: Mapping[str, Any], folder: Path) -> Image:
    """Return the image that a reference names. folder: the run folder that it is from."""
    name = reference_of(reference)
    assert name is not None
    read = partial(read_bytes, folder / reference["image"])
    return Image(name, reference["width"], reference["height"], read)


def _may_have_images(value: Any) -> bool:
    """Return quickly whether a JSON value has something that `_Reader` has to look at."""
    if isinstance(value, str):
        return len(value) >= MIN_TEXT_LENGTH and format_of(value) is not None
    if isinstance(value, dict):
        return any(_may_have_images(each) or _is_flat(value, name) for name, each in value.items())
    if isinstance(value, list) and value and isinstance(value[0], str | list | dict):
        return _has_rows(value) or any(map(_may_have_images, value))
    return False


def format_of(text: str) -> str | None:
    """Return the format of an image's text, as Pillow names it, or else as its data URL states.

    None: the text is not an image.
    """
    if len(text) < MIN_TEXT_LENGTH:
        return None
    url = DATA_URL.match(text)
    beginning = text[url.end() if url else 0 :][:MIN_TEXT_LENGTH]
    for signature, name in SIGNATURES.items():
        if signature.match(beginning):
            return name
    return url[1].upper() if url else None


def packed_bytes(text: str) -> bytes | None:
    """Decode base64, which may be a data URL; None if it is not base64."""
    url = DATA_URL.match(text)
    packed = "".join(text[url.end() if url else 0 :].split())
    try:
        return binascii.a2b_base64(packed + "=" * (-len(packed) % 4), strict_mode=True)
    except (binascii.Error, ValueError):  # ValueError: a letter beyond ASCII
        return None


def _has_rows(value: list[Any]) -> bool:
    """Return whether a list may be the rows of an image."""
    first = value[0]
    return len(value) >= MIN_SIDE and isinstance(first, list) and len(first) >= MIN_SIDE


def _is_flat(fields: dict[str, Any], name: str) -> bool:
    """Return whether a field is a list of numbers, with its shape in another field."""
    shape = fields.get(f"{name}_shape")
    numbers = fields[name]
    is_list = isinstance(numbers, list) and bool(numbers) and type(numbers[0]) is int
    return is_list and isinstance(shape, list)


class _Reader:
    def __init__(self) -> None:
        self._num_left = MAX_IMAGES
        self._pixels_left = ENOUGH_PIXELS

    def read(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._counted(_from_text, value)
        if isinstance(value, dict):
            return {
                name: self._counted(_from_flat, each, value[f"{name}_shape"])
                if _is_flat(value, name)
                else self.read(each)
                for name, each in value.items()
            }
        if isinstance(value, list) and value and isinstance(value[0], str | list | dict):
            image = self._counted(_from_rows, value) if _has_rows(value) else value
            return image if image is not value else [self.read(each) for each in value]
        return value

    def _counted(self, make: Callable[..., Image | None], value: Any, *more: Any) -> Any:
        may_read = self._num_left > 0 and self._pixels_left > 0
        image = make(value, *more) if may_read else None
        if image is None:
            return value
        self._num_left -= 1
        self._pixels_left -= image["width"] * image["height"]
        return image


def _from_text(text: str) -> Image | None:
    kind = format_of(text)
    if kind is None or kind not in SIGNATURES.values() or (data := packed_bytes(text)) is None:
        return None
    from PIL.GifImagePlugin import GifImageFile
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile
    from PIL.WebPImagePlugin import WebPImageFile

    if kind == "WEBP" and not _webp_pixels(data) <= MAX_PIXELS:
        return None  # Pillow reserves memory for the pixels as soon as it opens such a file.
    classes = {
        "PNG": PngImageFile,
        "JPEG": JpegImageFile,
        "GIF": GifImageFile,
        "WEBP": WebPImageFile,
    }
    try:
        with classes[kind](io.BytesIO(data)) as file:  # reads the header, which has the size
            if file.width * file.height > MAX_PIXELS:
                return None
            mode = "L" if file.mode in GRAY_MODES else "RGB"
            return _image(mode, file.width, file.height, file.convert(mode).tobytes())
    except Exception:  # whatever Pillow raises for a damaged file
        return None


def _webp_pixels(data: bytes) -> float:
    """Return the number of pixels that the header of a WebP file names; infinite if it has none."""
    kind, header = data[12:16], data[20:30]  # of the first chunk: its name, and how it begins
    if len(header) < 10:
        return math.inf
    if kind == b"VP8X":
        width, height = (1 + int.from_bytes(header[n : n + 3], "little") for n in (4, 7))
    elif kind == b"VP8L":
        sides = int.from_bytes(header[1:5], "little")
        width, height = 1 + (sides & 0x3FFF), 1 + (sides >> 14 & 0x3FFF)
    elif kind == b"VP8 ":
        width, height = (int.from_bytes(header[n : n + 2], "little") & 0x3FFF for n in (6, 8))
    else:
        return math.inf
    return width * height


def _from_flat(numbers: Any, shape: list[Any]) -> Image | None:
    """Make an image of a list of numbers. shape: height, width, and 1 or 3 channels."""
    if len(shape) not in (2, 3) or any(type(each) is not int or each < 0 for each in shape):
        return None
    height, width, channels = (*shape, 1)[:3]
    if min(height, width) < MIN_SIDE or channels not in (1, 3):
        return None
    if len(numbers) != height * width * channels or height * width > MAX_PIXELS:
        return None
    return _from_numbers(numbers, height, width, channels)


def _from_rows(rows: list[Any]) -> Image | None:
    """Make an image of rows of numbers, or of rows of lists of 1 or 3 numbers."""
    height, width = len(rows), len(rows[0])
    if height * width > MAX_PIXELS:
        return None
    if any(type(row) is not list or len(row) != width for row in rows):
        return None
    if type(rows[0][0]) is not list:
        return _from_numbers(list(chain.from_iterable(rows)), height, width, 1)
    channels, pixels = len(rows[0][0]), list(chain.from_iterable(rows))
    if channels not in (1, 3) or any(type(p) is not list or len(p) != channels for p in pixels):
        return None
    return _from_numbers(list(chain.from_iterable(pixels)), height, width, channels)


def _from_numbers(numbers: list[Any], height: int, width: int, channels: int) -> Image | None:
    if type(numbers[0]) is not int:  # true and false are numbers for `bytes`
        return None
    try:
        data = bytes(numbers)
    except (TypeError, ValueError):  # something else than a number of 0..255
        return None
    if channels == 1 and max(data) <= MAX_ON_BOARDS:
        return None
    return _image("L" if channels == 1 else "RGB", width, height, data)


def _image(mode: str, width: int, height: int, data: bytes) -> Image:
    import PIL.Image

    digest = hashlib.sha256(f"{mode} {width} {height} ".encode() + data).hexdigest()
    file = io.BytesIO()
    PIL.Image.frombytes(mode, (width, height), data).save(file, "PNG", compress_level=COMPRESSION)
    return Image(digest[:NAME_LENGTH], width, height, file.getvalue())
