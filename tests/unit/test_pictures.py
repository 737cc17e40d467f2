"""Pictures in observations become notes in what a model reads."""

import base64
import struct
import zlib

import pytest

from openenv_pipe.environments.adapters.pictures import without_pictures
from openenv_pipe.environments.adapters.templates import (
    compile_template,
    observation_message,
    observation_text,
    render_message,
)


def png(width: int, height: int) -> str:
    """Return a black picture as base64 of a PNG file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes((width + 1) * height))
    file = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )
    return base64.b64encode(file).decode()


NOTE = "[picture: png, 64 x 48 pixels, "
JPEG = base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(90)).decode()
KEPT = [
    "iVBORw0KGgo",
    "iVBORw0KGgo is how a PNG file begins, and this sentence is no such file: it has a colon.",
    "data:image/png;base64,",
    "a" * 500,
    [[0, 1], [2, 3]],
    7,
    None,
]


def test_a_picture_becomes_a_note_of_its_kind_and_size():
    assert without_pictures(png(64, 48)).startswith(NOTE)
    assert without_pictures(f"data:image/png;base64,{png(64, 48)}").startswith(NOTE)
    assert without_pictures(JPEG) == "[picture: jpeg, 96 bytes]"
    assert without_pictures("data:image/webp;base64," + "a" * 100) == "[picture: webp, 75 bytes]"


@pytest.mark.parametrize("value", KEPT)
def test_other_values_stay_as_they_are(value):
    assert without_pictures({"value": [value]}) == {"value": [value]}


@pytest.mark.parametrize("packed", ["iVBORw0KGgo" + "=" * 3 + "A" * 90, "iVBORw0KGgo" + "A" * 54])
def test_a_damaged_picture_is_a_note_or_a_text_and_no_error(packed):
    assert isinstance(without_pictures(packed), str)


def test_a_model_reads_the_note_wherever_the_picture_is():
    observation = {"frames": [{"image": png(64, 48)}], "score": 3}
    template = compile_template("first", "{{ frames[0].image }} {{ score }}")
    shown = render_message("user", template, observation)["content"]
    assert shown.startswith(NOTE) and shown.endswith("] 3")
    plain = observation_message("user", None, observation, observation_text)["content"]
    assert NOTE in plain and "iVBOR" not in plain
    assert observation["frames"][0]["image"] == png(64, 48)
