"""The folder `images/` of a run: a PNG file for each different image of its observations.

The names are digests of the pixels, so nothing is ever replaced, and a resumed run finds what it
would write again.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from openenv_pipe.environments.images import find_references, opened, replace_references
from openenv_pipe.system.files import write_bytes
from openenv_pipe.types import Episode, Image

FOLDER = "images"


def write_images(folder: Path, episodes: Iterable[Episode]) -> None:
    """Write the images of the episodes that a run's folder does not have yet.

    Raises RunFolderError: An image that was read from another run's folder is not there any more.
    """
    written: set[str] = set()
    observations = (each for episode in episodes for each in episode.observations)
    for reference in chain.from_iterable(map(find_references, observations)):
        path = folder / reference["image"]
        if not isinstance(reference, Image) or path.name in written:
            continue
        written.add(path.name)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_bytes(path, reference.png)


def open_images(episode: Episode, folder: Path) -> None:
    """Replace an episode's references by images of a run's folder, in place."""

    def known(value: Any) -> Any:
        return replace_references(value, lambda reference: opened(reference, folder))

    episode.first_observation = known(episode.first_observation)
    for turn in episode.turns:
        turn.messages = known(turn.messages)
        turn.steps = [replace(step, observation=known(step.observation)) for step in turn.steps]
