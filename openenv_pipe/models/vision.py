"""What an extra brings for vision-language models: how they read images, and a policy."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from openenv_pipe.config.schema import HubModelConfig, RunConfig
from openenv_pipe.registry import extras, load
from openenv_pipe.types import Image, Message

if TYPE_CHECKING:  # They use this module.
    from openenv_pipe.models.chat.chat_template import ChatFormat
    from openenv_pipe.models.policy import Policy


class ImageFormat(Protocol):
    """How one model reads images: as placeholder tokens in prompts, and as patches.

    In token ids, the image's own id stands in the place of each placeholder (`Image.token_id`), so
    that a token which the model has sampled is never taken for one.
    """

    placeholder_id: int
    tokens: list[str]  # of an image, in order; the placeholder is one of them

    def shown_in(self, message: Message) -> dict[str, Image]:
        """Return the images of a message that the model sees, by their notes, in order."""

    def num_tokens(self, image: Image) -> int:
        """Return how many placeholders an image has; 0 if the model cannot see it."""

    def with_ids(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        """Return token ids with the images' ids in the place of their placeholders, one for each.

        Raises ConfigError: there are not as many placeholders as images.
        """

    def grids(self, images: Sequence[Image]) -> torch.Tensor:
        """Return each image's numbers of patches [P, 3]: in time, in height and in width."""

    def patches(self, images: Sequence[Image]) -> torch.Tensor:
        """Return the patches of all images. Raises RunFolderError if a file cannot be read."""

    def save(self, folder: Path) -> None:
        """Write the settings in transformers' format."""


class Vision:
    """The vision-language models that can be trained: none, unless a subclass brings some."""

    model_types: tuple[str, ...] = ()  # `model_type` in their config.json
    vision_modules: str = ""  # the pattern of modules that adapters leave out

    def load_images(self, config: HubModelConfig, found: Any, tokenizer: Any) -> ImageFormat:
        """Load how a model reads images. found: its config, of transformers. Raises ConfigError."""
        raise NotImplementedError

    def make_policy(self, model: Any, chat: "ChatFormat", **options: Any) -> "Policy":
        """Make the policy. options: those of `Policy`."""
        raise NotImplementedError

    def reject_unsupported(self, config: RunConfig) -> None:
        """Raise ConfigError if the run needs what these models do not support."""
        raise NotImplementedError


def vision() -> Vision:
    """Return what an extra brings; without one, there are no such models."""
    kinds = [load(extra.vision) for extra in extras() if extra.vision]
    kind: type[Vision] = kinds[0] if kinds else Vision
    return kind()
