"""Create a run folder: write its first files, and give it a number. Also what attempts need of it.

Only `RunFolder` calls this.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.config.secrets import (
    hide_assignments,
    hide_in_code,
    hide_in_config,
    known_secrets,
)
from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.runs.provenance import (
    find_checkouts,
    find_code_digest,
    find_machine,
    find_versions,
)
from openenv_pipe.runs.record import AttemptRecord, Lineage, RunRecord
from openenv_pipe.runs.trust import local_code, signed_text, try_to_sign
from openenv_pipe.system.files import (
    digest_of_bytes,
    digest_of_file,
    point_symlink,
    read_bytes,
    sync,
    write_json,
    write_text,
)
from openenv_pipe.system.process_id import ProcessId

SUBFOLDERS = ("episodes", "checkpoints", "eval", "plots", "logs")


def check_writable(config: RunConfig) -> None:
    """Check that the run's folder can be made, by making one in a temporary folder beside it.

    Raises ConfigError: no run folder can be made.
    """
    folder = (Path(config.runs_dir) / config.name).absolute()
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with TemporaryDirectory(dir=existing, prefix=".check_") as trial:
            (Path(trial) / config.name).mkdir()
    except OSError as error:
        raise ConfigError(
            f"no run folder can be made for runs_dir={config.runs_dir!r} and name="
            f"{config.name!r}: {error}; choose a writable runs_dir, and a name that is valid "
            "for a folder"
        ) from error


def describe(
    folder: Path, config: RunConfig, overrides: Sequence[str], command: Sequence[str]
) -> dict[str, Any]:
    """Write all files of a new folder except run.json; return most fields of run.json."""
    values = config.model_dump(mode="json")
    secrets = known_secrets(values)
    write_config(folder / "config.json", values, secrets)
    lines = [hide_assignments(override, secrets) + "\n" for override in overrides]
    write_text(folder / "overrides.txt", "".join(lines))
    diffs = find_checkouts(local_code(config))
    diff_text = "".join(diff.text for diff in diffs)
    if diff_text:
        write_text(folder / "dirty.diff", hide_in_code(diff_text, secrets))
    make_subfolders(folder)
    open_logs(folder / "logs", after=0)
    words = [hide_assignments(word, secrets) for word in command]
    started = datetime.now(UTC)
    first = AttemptRecord(
        number=1,
        command=words,
        started=started,
        ended=None,
        status="running",
        cause=None,
        checkpoint=None,
        changed={},
        differences=[],
    )
    return {
        "status": "running",
        "cause": None,
        "command": words,
        "created": started,
        "ended": None,
        "process": ProcessId.of_this_process(),
        **signed(folder / "config.json", config),
        "checkouts": [diff.checkout for diff in diffs],
        "code_digest": find_code_digest(),
        "versions": find_versions(),
        "machine": find_machine(),
        "facts": {},
        "attempts": [first],
    }


def signed(path: Path, config: RunConfig) -> dict[str, Any]:
    """Return the fields of run.json that identify config.json and who wrote it."""
    digest, paths = digest_of_file(path), local_code(config)
    return {
        "config_digest": digest,
        "local_code": paths,
        "signature": try_to_sign(signed_text(digest, paths)),
    }


def described_config(folder: Path, record: RunRecord) -> bytes:
    """Return the content of config.json, or what a killed resume had still to write there.

    A resume that changes the configuration writes it with its logs, then run.json, and config.json
    at last. Any other config.json that run.json does not describe is returned as it is.

    Raises RunFolderError if config.json cannot be read.
    """
    content = read_bytes(folder / "config.json")
    if digest_of_bytes(content) == record.config_digest or len(record.attempts) == 1:
        return content
    logs = [folder / "logs" / f"attempt_{each.number}" for each in record.attempts[-2:]]
    try:
        before, new = (read_bytes(each / "config.json") for each in logs)
    except RunFolderError:
        return content
    is_unwritten = content == before and digest_of_bytes(new) == record.config_digest
    return new if is_unwritten else content


def without_secrets(lineage: Lineage | None, config: RunConfig) -> Lineage | None:
    if lineage is None:
        return None
    secrets = known_secrets(config.model_dump(mode="json"))
    return lineage.model_copy(update={"changed": hide_in_config(lineage.changed, secrets)})


def write_config(path: Path, values: Any, secrets: Mapping[str, str]) -> None:
    """Write a configuration without sorting keys: reward terms are summed in their order."""
    write_json(path, hide_in_config(values, secrets), sort_keys=False)


def allocate(aside: Path, parent: Path, name: str, record: dict[str, Any]) -> Path:
    """Rename `aside` to the next free number; renaming onto a folder with content fails."""
    for number in count(_highest(parent, r"(\d+)") + 1):
        path = parent / f"{number:04d}"
        described = RunRecord(id=f"{name}/{path.name}", **record)
        write_json(aside / "run.json", described.model_dump(mode="json"))
        try:
            aside.rename(path)
        except OSError:
            if not path.exists():
                raise
            continue  # Another process took this number.
        sync(parent)
        return path
    raise AssertionError("an endless loop ended")


def make_subfolders(folder: Path) -> None:
    """Make the folders in a run folder that are not there. Raises RunFolderError."""
    for name in SUBFOLDERS:
        try:
            (folder / name).mkdir(exist_ok=True)
        except FileExistsError as error:
            raise RunFolderError(
                f"{folder / name} is not a folder; move what is there away"
            ) from error


def open_logs(logs: Path, *, after: int) -> int:
    """Make the log folder of one more attempt, point `latest` to it, and return its number.

    after: the number of the last attempt, whose log folder may be gone.
    """
    number = max(_highest(logs, r"attempt_(\d+)"), after) + 1
    (logs / f"attempt_{number}").mkdir()
    point_symlink(logs / "latest", f"attempt_{number}")
    return number


def _highest(folder: Path, pattern: str) -> int:
    """Return the highest number among the matching names in a folder; 0 without any."""
    matches = (re.fullmatch(pattern, path.name) for path in folder.iterdir())
    return max((int(match.group(1)) for match in matches if match), default=0)
