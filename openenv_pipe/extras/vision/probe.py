"""Compares how the package reads images with the forward pass of a vision-language model itself.

The package places an image's vectors, and computes positions, for rows that grow turn by turn.
"""

import io
from itertools import pairwise
from typing import TYPE_CHECKING

import PIL.Image
import torch

from openenv_pipe.types import Image, Images

if TYPE_CHECKING:  # It uses this module.
    from openenv_pipe.extras.vision.policy import VisionPolicy

SIZES = ((61, 44), (33, 70))  # of the probe's images: width and height, in pixels
NAME_LENGTH = 32  # hexadecimal digits
NUM_TEXT = 3  # tokens before each image, and after the last


def image_differences(policy: "VisionPolicy") -> dict[str, float]:
    """Return the largest difference of a logprob from the model's own, for each forward pass."""
    known = policy.probe_images
    ids, ends = _token_ids(policy, [*known.values()])
    ids_1T = torch.tensor([ids], device=policy.device)
    expected = torch.log_softmax(policy.model_logits(ids_1T, known)[0].float(), dim=-1)
    learner = policy.logits(policy.hidden(ids_1T, images=known))[0].float()
    rows, places = _row_logits(policy, ids, ends, known)

    def difference(logits: torch.Tensor, wanted: torch.Tensor) -> float:
        return (torch.log_softmax(logits, dim=-1) - wanted).abs().max().item()

    return {
        "the learner's (with images)": difference(learner, expected),
        "engine=local's (with images)": difference(rows, expected[places]),
    }


def probe_images() -> dict[int, Image]:
    """Return two made-up images, by their token ids."""
    images = [_image(number, *size) for number, size in enumerate(SIZES)]
    return {each.token_id: each for each in images}


def _image(number: int, width: int, height: int) -> Image:
    data = bytes(index * (7 + number) % 256 for index in range(3 * width * height))
    file = io.BytesIO()
    PIL.Image.frombytes("RGB", (width, height), data).save(file, "PNG")
    return Image(str(number) * NAME_LENGTH, width, height, file.getvalue())


def _token_ids(policy: "VisionPolicy", images: list[Image]) -> tuple[list[int], list[int]]:
    """Return the probe, and where each of its parts ends that a turn would add."""
    assert policy.images is not None
    start, placeholder, end = policy.tokenizer.convert_tokens_to_ids(policy.images.tokens)
    plain = [each for each in range(1, 3 * NUM_TEXT) if each not in (start, placeholder, end)]
    ids, ends = [], []
    for image in images:
        ids += [*plain[:NUM_TEXT], start]
        ids += [image.token_id] * policy.images.num_tokens(image)
        ids += [end, *plain[:NUM_TEXT]]
        ends.append(len(ids))
    return ids, ends


def _row_logits(
    policy: "VisionPolicy", ids: list[int], ends: list[int], images: Images
) -> tuple[torch.Tensor, list[int]]:
    """Return logits [K, V] as the engine computes them, and the places in the probe they belong to.

    The last token of each part is fed by itself, as one that was sampled.
    """
    (forward,) = policy.row_forwards(1)
    forward.reserve_rows(1)
    logits, places = [], []
    for begin, end in pairwise([0, *ends]):
        logits.append(forward.feed([ids[begin : end - 1]], [begin], images))
        last = torch.tensor([end - 1], device=policy.device)
        logits.append(forward.step(torch.tensor([ids[end - 1]], device=policy.device), last))
        places += [end - 2, end - 1]
    return torch.cat(logits).float(), places
