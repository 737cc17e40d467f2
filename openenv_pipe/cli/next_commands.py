"""The commands to enter next: for `openenv-pipe` alone, and where `openenv-pipe demo` ends.

`openenv-pipe` alone prints them with each start, so run.json is read without loading pydantic.
"""

import shlex
from pathlib import Path
from typing import Any

from openenv_pipe.errors import PipeError
from openenv_pipe.registry import if_command
from openenv_pipe.runs.places import FORMAT, runs_folders
from openenv_pipe.system.files import read_json
from openenv_pipe.system.resources import short_path
from openenv_pipe.system.untrusted_text import for_people

DEMO_TAKES = "12 to 25 minutes on two CPU cores"


def next_commands() -> str:
    """Return the next commands, one per line: for the newest training run, or the first ones.

    The newest is the one that began last. A folder that cannot be read counts as none.
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
        (if_command("env", "env find"), "lists environments that exist"),
    ]


def _after(path: str, status: str) -> list[tuple[str, str]]:
    run = shlex.quote(path)
    view = if_command("view", f"view {run}")
    if status == "running":
        return [(view, "shows its curves and episodes while it runs"), ("runs", "lists all")]
    if status == "finished":
        return [
            (view, "shows its curves, episodes and tokens"),
            (f"eval {run}@start {run}", "compares it with where it started, on the same tasks"),
            *_own_environment(),
        ]
    shown = [(view, "shows how far it got")]
    if status == "failed" and not any(Path(path, "checkpoints").glob("*_*")):
        return shown  # It would fail again.
    fixed = f", after you fix what {path}/report.md names" if status == "failed" else ""
    return [(f"train --resume {run}", f"continues it{fixed}"), *shown]


def _own_environment() -> list[tuple[str, str]]:
    return [(if_command("env", "env new my_env"), "writes an environment of your own")]


def _newest_run() -> tuple[str, str] | None:
    """Return the folder and the status of the newest training run, as `RunFolder` has them."""
    try:
        files = [file for folder in runs_folders() for file in folder.glob("*/[0-9]*/run.json")]
    except (OSError, RuntimeError):  # a folder that cannot be searched, or a link to itself
        return None
    newest: tuple[str, Path, str] | None = None
    for file in files:
        try:
            record = read_json(file)
            status, created = _training_status(record), str(record["created"])
        except (OSError, PipeError, AttributeError, KeyError, TypeError, ValueError):
            continue  # `openenv-pipe runs` shows it as unreadable
        if status is not None and (newest is None or created > newest[0]):
            newest = created, file.parent, status
    return None if newest is None else (short_path(newest[1]), newest[2])


def _training_status(record: dict[str, Any]) -> str | None:
    """Return the status of a run that trains; None for evaluations and reproductions."""
    origin = record.get("lineage") or {}
    status = record.get("status")
    is_training = record.get("purpose") == "training" and origin.get("kind") != "reproduction"
    if not is_training or record.get("format") != FORMAT:
        return None
    if status == "running":
        from openenv_pipe.system.process_id import ProcessId

        return "running" if ProcessId.model_validate(record.get("process")).alive else "died"
    return status if status in ("finished", "failed", "interrupted") else None
