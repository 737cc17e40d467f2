"""Images in what a model reads: in the text, a note stands for each image."""

from collections.abc import Mapping
from typing import Any

from openenv_pipe.environments.images import format_of, packed_bytes, reference_of
from openenv_pipe.types import Image


class Notes:
    """The notes for the images of one message, numbered in their order."""

    def __init__(self) -> None:
        self._num_notes = 0
        self._images: dict[str, Image] = {}

    def replace(self, value: Any) -> Any:
        """Return a JSON value with a note in place of each image.

        A text that looks like an image but could not be read also becomes a note.
        """
        if isinstance(value, str):
            return _unread(value) or value
        if isinstance(value, Mapping):
            if reference_of(value) is not None:
                return self._note(value)
            return {name: self.replace(each) for name, each in value.items()}
        if isinstance(value, list) and value and isinstance(value[0], str | list | Mapping):
            return [self.replace(each) for each in value]
        return value

    def shown_in(self, text: str) -> dict[str, Image]:
        """Return the images whose notes are in a text, by their notes."""
        return {note: image for note, image in self._images.items() if note in text}

    def _note(self, reference: Mapping[str, Any]) -> str:
        self._num_notes += 1
        note = f"[image {self._num_notes}: {reference['width']} x {reference['height']} pixels]"
        if isinstance(reference, Image):  # and not read from a file, or sent by a server
            self._images[note] = reference
        return note


def _unread(text: str) -> str | None:
    """Return the note for an image that could not be read; None for other texts."""
    kind = format_of(text)
    data = None if kind is None else packed_bytes(text)
    return None if data is None or kind is None else f"[image: {kind.lower()}, {len(data)} bytes]"
