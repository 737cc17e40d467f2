"""Tags of runs: words that people give to runs, to find them again.

They are in `tags.json` of the run folder, and are neither compared, signed nor exported.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.system.files import read_json, write_json

FILE = "tags.json"
TAG = re.compile(r"\w[\w.-]{0,39}")
MAX_TAGS = 20


def read_tags(folder: Path) -> list[str]:
    """Return the tags of a run in alphabetical order; what is not a tag is left out."""
    try:
        found = read_json(folder / FILE) if (folder / FILE).exists() else []
    except (RunFolderError, OSError):
        return []
    if not isinstance(found, list):
        return []
    tags = {each for each in found if isinstance(each, str) and TAG.fullmatch(each)}
    return sorted(tags)[:MAX_TAGS]


def change_tags(folder: Path, *, add: Iterable[str] = (), remove: Iterable[str] = ()) -> list[str]:
    """Add and remove tags of a run, and return those that it has then.

    Raises:
        ConfigError: A tag is not a word, or there are too many.
        RunFolderError: The folder cannot be written.
    """
    added = set(add)
    for tag in sorted(added):
        if not TAG.fullmatch(tag):
            raise ConfigError(
                f"{tag!r:.80} is not a tag; expected a word of up to 40 letters, digits, dots, "
                "hyphens and underscores, such as baseline"
            )
    tags = sorted({*read_tags(folder), *added} - set(remove))
    if len(tags) > MAX_TAGS:
        raise ConfigError(f"{folder} would have {len(tags)} tags; a run has at most {MAX_TAGS}")
    try:
        write_json(folder / FILE, tags)
    except OSError as error:
        raise RunFolderError(f"cannot write {folder / FILE}: {error}") from error
    return tags
