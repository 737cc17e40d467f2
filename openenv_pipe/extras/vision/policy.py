"""The policy of a vision-language model like Qwen2-VL, and its check: rows of tokens with images.

Each sample has a row of its own, neither packed nor with a shared prefix, because an image's tokens
have positions in three dimensions: time, height and width.

Shape letters: B rows, T tokens, R rows of a cache, Q new tokens of a forward pass, V vocabulary.
"""

import io
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import PIL.Image
import torch

from openenv_pipe.algorithms.batch import Batch
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.forward.attention.packed import own_attention
from openenv_pipe.models.forward.products import embed
from openenv_pipe.models.forward.row_forward import RowForward, Rows, Sampler, TransformersForward
from openenv_pipe.models.policy import Policy
from openenv_pipe.types import IMAGE_IDS, NO_IMAGES, Image, Images

SIZES = ((61, 44), (33, 70))  # of the probe's images: width and height, in pixels
NAME_LENGTH = 32  # hexadecimal digits
NUM_TEXT = 3  # tokens before each image, and after it


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
    """Return the tokens of the probe, and the end of each part that a turn would add."""
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
    """Return logits [K, V] as the engine computes them, and the K places in the probe they are of.

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


class VisionPolicy(Policy):
    """A vision-language model, its chat format and its image processor on one device."""

    padding_reason = "tokens of images have positions in three dimensions"
    samplers = (Sampler.RAGGED,)

    def __init__(self, model: Any, chat: ChatFormat, **options: Any) -> None:
        super().__init__(model, chat, **options)
        assert chat.images is not None
        self._images = chat.images
        self.probe_images = probe_images()
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._vision: Any = inner.model  # with both of its parts, but not the head

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        cache: Any = None,
        images: Images = NO_IMAGES,
    ) -> torch.Tensor:
        """Return the last hidden states [B, T, hidden size]; without a mask, causal attention.

        positions: [3, B, T]; None: those of rows that begin at their first token.
        images: those whose ids are in the rows.
        """
        if positions is None:
            positions = self.positions_of(token_ids, images)
        with self._precision():
            return self.decoder(
                inputs_embeds=self._embedded(token_ids, images),
                position_ids=positions,
                attention_mask=mask,
                use_cache=cache is not None,
                **{self._cache_argument: cache},
            ).last_hidden_state

    def positions_of(self, token_ids: torch.Tensor, images: Images) -> torch.Tensor:
        """Return the positions [3, B, T] of rows that begin at position 0."""
        shown = [token_id for token_id, _ in _runs(token_ids)]
        grids = self._images.grids([images[each] for each in shown]).to(token_ids.device)
        is_image_BT = (token_ids >= IMAGE_IDS).int()
        positions, _ = self._vision.get_rope_index(token_ids, is_image_BT, image_grid_thw=grids)
        return positions

    def model_logits(self, token_ids: torch.Tensor, images: Images = NO_IMAGES) -> torch.Tensor:
        """Return the logits [B, T, V] of transformers' own forward pass, for comparison."""
        if not images:
            return super().model_logits(token_ids)
        shown = [images[token_id] for token_id, _ in _runs(token_ids)]
        is_image_BT = token_ids >= IMAGE_IDS
        with self._precision(), own_attention(self._inner):
            return self.model(
                input_ids=token_ids.masked_fill(is_image_BT, self._vision.config.image_token_id),
                mm_token_type_ids=is_image_BT.int(),
                pixel_values=self._images.patches(shown).to(self.device),
                image_grid_thw=self._images.grids(shown).to(self.device),
                use_cache=False,
            ).logits

    def image_differences(self) -> dict[str, float]:
        return image_differences(self)

    def row_forwards(self, num: int) -> list[RowForward]:
        return [VisionForward(self) for _ in range(num)]

    def _hidden_of_samples(self, token_ids: torch.Tensor, batch: Batch) -> torch.Tensor:
        images = {name: each for sample in batch.samples for name, each in sample.images.items()}
        return self.hidden(token_ids, images=images)

    def _embedded(self, token_ids: torch.Tensor, images: Images) -> torch.Tensor:
        """Return the decoder's input [B, T, hidden size]: embeddings, and vectors of images."""
        is_image_BT = token_ids >= IMAGE_IDS
        embedded = embed(self._embedding, token_ids.masked_fill(is_image_BT, 0))
        runs = list(_runs(token_ids))
        if not runs:
            return embedded
        distinct = list(dict.fromkeys(token_id for token_id, _ in runs))
        read = [images[each] for each in distinct]
        patches, grids = self._images.patches(read), self._images.grids(read)
        found = self._vision.get_image_features(patches.to(self.device), grids.to(self.device))
        vectors = dict(zip(distinct, found.pooler_output, strict=True))
        assert all(len(vectors[token_id]) == num for token_id, num in runs), "a part of an image"
        in_order = torch.cat([vectors[token_id] for token_id, _ in runs])
        return embedded.masked_scatter(is_image_BT[..., None], in_order.to(embedded.dtype))

    def _like_this(self, model: Any) -> "VisionPolicy":
        return VisionPolicy(model, self.chat, device=self.device, autocast=self._autocast)


class VisionForward(TransformersForward):
    """The forward pass of transformers' own modules, for rows with images."""

    def __init__(self, policy: VisionPolicy) -> None:
        super().__init__(policy)
        self._policy = policy
        self._shifts: list[int] = []  # of each row: its next token's position, minus its place

    def reserve_rows(self, num_rows: int) -> None:
        super().reserve_rows(num_rows)
        self._shifts += [0] * (num_rows - len(self._shifts))

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        super().copy_rows(sources, targets)
        before = list(self._shifts)
        for source, target in zip(sources, targets, strict=True):
            self._shifts[target] = before[source]

    def feed(
        self, new_ids: Rows, starts: Sequence[int], images: Images = NO_IMAGES
    ) -> torch.Tensor:
        ids_RQ, places_RQ, last_R = self._in_rows(new_ids, starts)
        positions_3RQ = self._policy.positions_of(ids_RQ, images)
        for row, (ids, start) in enumerate(zip(new_ids, starts, strict=True)):
            first = start + (self._shifts[row] if start else 0)
            positions_3RQ[:, row] += first
            following = int(positions_3RQ[:, row, : len(ids)].max()) + 1
            self._shifts[row] = following - (start + len(ids))
        mask = self._cache.write_at(places_RQ)
        hidden = self._policy.hidden(ids_RQ, positions_3RQ, mask, self._cache, images)
        return self._last_logits(hidden, last_R)

    def step(self, token_ids_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        places_R1 = positions_R[:, None]
        shifts_R1 = self._tensor(self._shifts[: len(places_R1)])[:, None]
        positions_3R1 = (places_R1 + shifts_R1).expand(3, -1, -1)
        mask = self._cache.write_at(places_R1)
        hidden = self._policy.hidden(token_ids_R[:, None], positions_3R1, mask, self._cache)
        return self._last_logits(hidden, positions_R.new_zeros(1))


def _runs(token_ids: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the images in rows [B, T], in order: the id of each, and how often it stands there.

    Other tokens stand between two images, even between equal ones.
    """
    for row in token_ids.tolist():
        for token_id, run in groupby(row):
            if token_id >= IMAGE_IDS:
                yield token_id, len(list(run))
