"""Images as vision-language models like Qwen2-VL read them: placeholder tokens, and patches."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from openenv_pipe.config.schema import HubModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.hub import model_source, readable_errors
from openenv_pipe.models.vision import ImageFormat
from openenv_pipe.types import Image, Message


class QwenImages(ImageFormat):
    """The image processor of one model, and its tokens around and in place of an image.

    On every machine it is the processor that needs no torchvision: others resize differently.
    """

    def __init__(self, config: HubModelConfig, found: Any, tokenizer: Any) -> None:
        with readable_errors(config):
            self._processor = Qwen2VLImageProcessorPil.from_pretrained(
                model_source(config),
                revision=config.revision,  # type: ignore[arg-type]  # None is the newest
            )
        self.placeholder_id: int = found.image_token_id
        ids = [found.vision_start_token_id, self.placeholder_id, found.vision_end_token_id]
        self.tokens: list[str] = tokenizer.convert_ids_to_tokens(ids)  # of an image, in order
        if not all(self.tokens):
            raise ConfigError(
                f"the tokenizer has no tokens {ids}, which config.json names for images; use the "
                "tokenizer of the model"
            )

    def shown_in(self, message: Message) -> dict[str, Image]:
        text, images = message["content"], message.get("images", {})
        return {
            note: images[note]
            for note in sorted(images, key=text.find)
            if note in text and self.num_tokens(images[note])
        }

    def num_tokens(self, image: Image) -> int:
        try:
            _, rows, columns = self._grid(image)
        except ValueError:  # too narrow: one side is more than 200 times as long as the other
            return 0
        return rows * columns // self._processor.merge_size**2

    def with_ids(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        if token_ids.count(self.placeholder_id) != len(images):
            raise ConfigError(
                f"the chat template shows {token_ids.count(self.placeholder_id)} of "
                f"{len(images)} images; set model.chat_template to one that shows the whole "
                "content of messages"
            )
        following = iter(images)
        ids: list[int] = []
        for token_id in token_ids:
            if token_id == self.placeholder_id:
                image = next(following)
                ids += [image.token_id] * self.num_tokens(image)
            else:
                ids.append(token_id)
        return ids

    def grids(self, images: Sequence[Image]) -> torch.Tensor:
        return torch.tensor([self._grid(each) for each in images]).reshape(-1, 3)

    def _grid(self, image: Image) -> tuple[int, int, int]:
        """Return an image's grid of patches. Raises ValueError for one that is too narrow."""
        processor: Any = self._processor
        height, width = smart_resize(
            image["height"],
            image["width"],
            factor=processor.patch_size * processor.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
        )
        return 1, height // processor.patch_size, width // processor.patch_size

    def patches(self, images: Sequence[Image]) -> torch.Tensor:
        opened = []
        for image in images:
            with PIL.Image.open(io.BytesIO(image.png), formats=["PNG"]) as file:
                opened.append(file.convert("RGB"))
        patches: torch.Tensor = self._processor(images=opened, return_tensors="pt")["pixel_values"]
        return patches

    def save(self, folder: Path) -> None:
        self._processor.save_pretrained(folder)
