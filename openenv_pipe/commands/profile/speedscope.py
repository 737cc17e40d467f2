"""A profile as a file for https://www.speedscope.app: a flame graph for each thread.

The outermost frame of each stack is its activity. The format is described by
https://www.speedscope.app/file-format-schema.json (type `sampled`).
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from openenv_pipe import __version__
from openenv_pipe.commands.profile.command import Profiled
from openenv_pipe.commands.profile.recorder import Moment
from openenv_pipe.system.files import write_text

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def write_speedscope(profiled: Profiled, path: Path) -> None:
    """Write a flame graph for each thread that did something."""
    write_text(path, json.dumps(as_speedscope(profiled)))


def as_speedscope(profiled: Profiled) -> dict[str, Any]:
    """Return the file's content."""
    frames = _Frames()
    moments = list(profiled.lasting())
    threads = sorted({thread for moment, _ in moments for thread in moment.working})
    return {
        "$schema": SCHEMA,
        "name": f"{profiled.config.name}, {len(profiled.steps)} steps",
        "exporter": f"openenv-pipe {__version__}",
        "activeProfileIndex": 0,
        "profiles": [_profile(thread, moments, frames) for thread in threads],
        "shared": {"frames": frames.described},
    }


class _Frames:
    """The frames of all profiles, each described once."""

    def __init__(self) -> None:
        self.described: list[dict[str, str | int]] = []
        self._indices: dict[CodeType | str, int] = {}

    def index(self, frame: CodeType | str) -> int:
        """Return the index of a frame: a function, or the name of an activity."""
        if frame not in self._indices:
            self._indices[frame] = len(self.described)
            if isinstance(frame, str):
                self.described.append({"name": frame})
            else:
                file = _short(frame.co_filename)
                self.described.append(
                    {"name": frame.co_qualname, "file": file, "line": frame.co_firstlineno}
                )
        return self._indices[frame]


def _profile(
    thread: str, moments: Sequence[tuple[Moment, float]], frames: _Frames
) -> dict[str, Any]:
    """Return the profile of a thread. Equal stacks in a row are one sample; a wait is empty."""
    samples: list[list[int]] = []
    lasting: list[float] = []
    for moment, lasts_s in moments:
        label, stack = moment.working.get(thread, ("", ()))
        sample = [frames.index(frame) for frame in ([label] if label else []) + list(stack)]
        if samples and samples[-1] == sample:
            lasting[-1] += lasts_s
        else:
            samples.append(sample)
            lasting.append(lasts_s)
    return {
        "type": "sampled",
        "name": thread,
        "unit": "seconds",
        "startValue": 0.0,
        "endValue": sum(lasting),
        "samples": samples,
        "weights": lasting,
    }


def _short(file: str) -> str:
    """Return a file's path below the folder that Python has imported it from."""
    roots = [f"{path}/" for path in sys.path if path and file.startswith(f"{path}/")]
    return file.removeprefix(max(roots, key=len, default=""))
