"""The commands to enter next: for `openenv-pipe` alone, and where `openenv-pipe demo` ends.

`openenv-pipe` alone prints them with each start, so run.json is read without loading pydantic.
"""

import shlex
from pathlib import Path
from typing import Any

from openenv_pipe.errors import PipeError
from openenv_pipe.registry import if_command
from openenv_pipe.runs.places import runs_folders
from openenv_pipe.system.files import read_json
from openenv_pipe.system.resources import short_path
from openenv_pipe.system.untrusted_text import for_people

DEMO_TAKES = "12 to 25 minutes on two CPU cores"


def next_commands() -> str:
    """Return the commands that follow, one a line: of the newest training run, or the first ones.

    The newest is the one that began or ended last. A folder that cannot be read counts as none.
    """
    newest = _newest_run()
    lines = [] if newest is None else [f"newest run: {newest[0]}, {newest[1]}"]
    commands = _first() if newest is None else _after(*newest)
    shown = [(f"openenv-pipe {command}", what) for command, what in commands if command]
    width = max(len(command) for command, _ in shown)
    lines += ["next:", *(f"  {command:{width}}  # {what}" for command, what in shown)]
    return "\n".join(map(for_people, lines))


def _first() -> list[tuple[str, str]]:
    return [
        ("demo", f"trains a small language model, in {DEMO_TAKES}"),
        *_own_environment(),
        (if_command("env", "env inspect ./my_env"), "or begins with one that exists"),
    ]


def _after(path: str, status: str) -> list[tuple[str, str]]:
    run = shlex.quote(path)
    view = if_command("view", f"view {run}")
    if status == "running":
        return [(view, "shows its curves and episodes, while it goes on"), ("runs", "lists all")]
    if status == "finished":
        return [
            (view, "shows its curves, episodes and tokens"),
            (f"eval {run}@start {run}", "compares it with where it started, on the same tasks"),
            *_own_environment(),
        ]
    once = f", once what {path}/report.md says is corrected" if status == "failed" else ""
    return [(f"train --resume {run}", f"continues it{once}"), (view, "shows how far it got")]


def _own_environment() -> list[tuple[str, str]]:
    return [(if_command("env", "env new my_env"), "writes an environment of your own")]


def _newest_run() -> tuple[str, str] | None:
    """Return the folder and the status of the newest training run, as `RunFolder` has them."""
    files: list[tuple[float, Path]] = []
    for file in (each for folder in runs_folders() for each in folder.glob("*/[0-9]*/run.json")):
        try:
            files.append((file.stat().st_mtime, file))
        except OSError:  # it is removed meanwhile
            continue
    for _, file in sorted(files, reverse=True):
        try:
            record = read_json(file)
            if (status := _training_status(record)) is not None:
                return short_path(file.parent), status
        except (OSError, PipeError, AttributeError, ValueError):
            continue  # `openenv-pipe runs` shows it as unreadable
    return None


def _training_status(record: dict[str, Any]) -> str | None:
    """Return the status of a run that trains; None for evaluations and reproductions."""
    origin = record.get("lineage") or {}
    status = record.get("status")
    if record.get("purpose") != "training" or origin.get("kind") == "reproduction":
        return None
    if status == "running":
        from openenv_pipe.system.process_id import ProcessId

        return "running" if ProcessId.model_validate(record.get("process")).alive else "died"
    return status if status in ("finished", "failed", "interrupted") else None
