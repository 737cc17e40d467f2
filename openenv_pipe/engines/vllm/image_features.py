"""Images in requests to vLLM: the patches that the model reads, and their places in the prompt.

The trainer's own image processor makes the patches, so server and trainer read equal numbers. A
request has them as vLLM's `features`: msgpack in base64, as `MsgpackDecoder` of vLLM 0.32 reads it
(vllm/v1/serial_utils.py). Sampled tokens are never taken for an image, because `features` say
where the images are.
"""

import base64
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from openenv_pipe.engines.vllm.client import Features
from openenv_pipe.types import IMAGE_IDS, Image, Images

if TYPE_CHECKING:
    from openenv_pipe.models.weights import PolicyWeights

MOST_KEPT = 256 << 20  # characters of encoded images; one of 640 x 480 pixels has 10 million
ARRAY_CONTENT = 3  # vLLM's extension type of msgpack for the bytes of an array


class ImageEncoder:
    """Encodes the images of prompts, in any thread. Those that were used last are cached."""

    def __init__(self, weights: "PolicyWeights") -> None:
        self._weights = weights
        self._encoded: OrderedDict[int, str] = OrderedDict()  # by the image's token id
        self._num_characters = 0
        self._lock = threading.Lock()

    def encode(
        self, prompt: Sequence[int], images: Images
    ) -> tuple[Sequence[int], Features | None]:
        """Return a prompt with placeholders in the place of images, and the images.

        Raises RunFolderError: an image's file cannot be read.
        """
        shown: list[Image] = []
        places: list[dict[str, int]] = []
        place = 0
        for token_id, run in groupby(prompt):
            length = len(list(run))
            if token_id >= IMAGE_IDS:
                shown.append(images[token_id])
                places.append({"offset": place, "length": length})
            place += length
        if not shown:
            return prompt, None
        with self._lock:
            encoded = [self._encode(each) for each in shown]
        placeholder = self._weights.placeholder_id
        assert placeholder is not None
        token_ids = [placeholder if each >= IMAGE_IDS else each for each in prompt]
        return token_ids, {
            "mm_hashes": {"image": [each["image"] for each in shown]},
            "mm_placeholders": {"image": places},
            "kwargs_data": {"image": encoded},
        }

    def _encode(self, image: Image) -> str:
        """Return an image's patches and its grid in vLLM's format."""
        name = image.token_id
        if name in self._encoded:
            self._encoded.move_to_end(name)
            return self._encoded[name]
        patches, grid = self._weights.read_image(image)
        num_patches, _ = patches.shape
        item = {
            "pixel_values": {
                "data": ["float32", list(patches.shape), patches.astype("<f4").tobytes()],
                "field": ["flat", {"slices": [[0, num_patches, None]], "dim": 0}],
            },
            "image_grid_thw": {
                "data": ["int64", list(grid.shape), grid.astype("<i8").tobytes()],
                "field": ["batched", {"keep_on_cpu": True}],
            },
        }
        encoded = base64.b64encode(_packed(item)).decode()
        self._encoded[name] = encoded
        self._num_characters += len(encoded)
        while self._num_characters > MOST_KEPT and len(self._encoded) > 1:
            _, oldest = self._encoded.popitem(last=False)
            self._num_characters -= len(oldest)
        return encoded


def _packed(value: Any) -> bytes:
    """Return a value in msgpack; bytes as vLLM's extension for the content of arrays."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return b"\xd3" + value.to_bytes(8, "big", signed=True)
    length = len(value).to_bytes(4, "big")
    if isinstance(value, bytes):
        return b"\xc9" + length + bytes([ARRAY_CONTENT]) + value
    if isinstance(value, str):
        return b"\xdb" + length + value.encode("ascii")
    if isinstance(value, dict):
        return b"\xdf" + length + b"".join(_packed(k) + _packed(v) for k, v in value.items())
    return b"\xdd" + length + b"".join(map(_packed, value))
