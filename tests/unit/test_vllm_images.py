"""Images in requests to vLLM, and what a server needs that sees them. tests/integration/
test_vllm_vision.py asks a real server."""

import base64

import numpy as np
import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.vllm import image_features, installed
from openenv_pipe.engines.vllm.image_features import ImageEncoder
from openenv_pipe.engines.vllm.server_command import ServerSpec, server_arguments
from openenv_pipe.errors import EngineMissingError
from openenv_pipe.types import Image
from tests.small_vllm import SmallPolicyWeights

PLACEHOLDER = 9
RED, BLUE = Image("0" * 31 + "1", 4, 4, b"red"), Image("f" * 32, 4, 4, b"blue")


class SeeingPolicyWeights(SmallPolicyWeights):
    """Reads an image as two patches of three numbers."""

    placeholder_id = PLACEHOLDER

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Image] = []

    def read_image(self, image: Image) -> tuple[np.ndarray, np.ndarray]:
        self.read.append(image)
        return np.full((2, 3), len(image.png), dtype=np.float32), np.array([1, 1, 2])


@pytest.fixture
def source() -> SeeingPolicyWeights:
    return SeeingPolicyWeights()


PROMPT = [PLACEHOLDER, *[BLUE.token_id] * 2, 5, RED.token_id, 6, BLUE.token_id, BLUE.token_id]
IMAGES = {each.token_id: each for each in (RED, BLUE)}


def test_images_are_where_their_ids_are(source):
    """A sampled placeholder, the first token here, is no image."""
    ids, features = ImageEncoder(source).encode(PROMPT, IMAGES)
    assert ids == [PLACEHOLDER] * 3 + [5, PLACEHOLDER, 6, PLACEHOLDER, PLACEHOLDER]
    places = [(each["offset"], each["length"]) for each in features["mm_placeholders"]["image"]]
    assert places == [(1, 2), (4, 1), (6, 2)]
    assert features["mm_hashes"]["image"] == [each["image"] for each in (BLUE, RED, BLUE)]
    first, second, third = features["kwargs_data"]["image"]
    assert first == third != second
    assert source.read == [BLUE, RED]  # each image is encoded once
    assert np.full((2, 3), 4, dtype=np.float32).tobytes() in base64.b64decode(first)


def test_a_prompt_without_images_is_sent_as_it_is(source):
    assert ImageEncoder(source).encode([1, PLACEHOLDER, 2], IMAGES) == (
        [1, PLACEHOLDER, 2],
        None,
    )


def test_the_images_used_last_are_kept(source, monkeypatch):
    monkeypatch.setattr(image_features, "MOST_KEPT", 1)
    encoder = ImageEncoder(source)
    for shown in (RED, RED, BLUE, RED):
        encoder.encode([shown.token_id], IMAGES)
    assert source.read == [RED, BLUE, RED]


def test_values_are_written_as_msgpack():
    """By hand, after msgpack's specification."""
    packed = image_features._packed({"a": [-2, True, None, b"xy"]})
    number = b"\xd3" + b"\xff" * 7 + b"\xfe"
    array = b"\xdd\0\0\0\x04" + number + b"\xc3" + b"\xc0" + b"\xc9\0\0\0\x02\x03xy"
    assert packed == b"\xdf\0\0\0\x01" + b"\xdb\0\0\0\x01a" + array


def test_a_server_that_sees_images_takes_their_patches_as_they_are():
    engine = compose(["conf=smoke", "engine=vllm"]).config.engine
    common = {"model": "/m", "revision": None, "dtype": "float32", "lora_rank": 0}
    for build in ("cpu", "cuda"):
        spec = ServerSpec(**common, build=build, sees_images=True)
        arguments = server_arguments(spec, engine, "h", 1)
        assert "--no-mm-device-do-normalize" in arguments  # the trainer's processor has done that
        assert ("--skip-mm-profiling" in arguments) == (build == "cpu")
    text = server_arguments(ServerSpec(**common, build="cpu"), engine, "h", 1)
    assert not any("-mm-" in each for each in text)


def test_torchvision_is_for_servers_that_see_images_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    without = [str(installed.INSIDE), str(installed.SERVER_SIDE)]
    assert installed.python_path(False).split(":") == without
    assert installed.python_path(True).split(":") == [*without, str(installed.torchvision_dir())]
    with pytest.raises(EngineMissingError, match="`openenv-pipe engine install vllm --build cpu`"):
        installed.require_images("cpu")
    installed.require_images("cuda")  # that build's own environment has it
