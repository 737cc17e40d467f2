"""A recording: a run folder without weights, small enough for version control.

    run.json config.json metrics.jsonl episodes/ eval/     copied
    checkpoints.json                                       the sha256 of every checkpoint's files

`reproduce` accepts it in place of its run. Nothing is overwritten.
"""

import json
import shutil
from pathlib import Path

from openenv_pipe.commands.reproduce.comparing import RECORDED_DIGESTS, checkpoint_digests
from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.find import find_run
from openenv_pipe.system.files import write_json, write_text


def record(name: str, to: Path, *, steps: int | None, runs_dir: Path) -> None:
    """Write the recording of a run, or of its first steps. Raises RunFolderError."""
    folder = find_run(name, runs_dir)
    lines = folder.metrics_path.read_text().splitlines() if folder.metrics_path.exists() else []
    kept = [line for line in lines if _is_kept(json.loads(line), steps)]
    if not kept:
        raise RunFolderError(f"{folder.path} has no step yet, so there is nothing to record")
    try:
        to.mkdir(parents=True)
    except OSError as error:
        raise RunFolderError(f"cannot write the recording {to}: {error}") from None
    for file in ("config.json", "overrides.txt"):
        shutil.copyfile(folder.path / file, to / file)
    write_text(to / "metrics.jsonl", "".join(line + "\n" for line in kept))
    (to / "episodes").mkdir()
    for path in sorted((folder.path / "episodes").glob("step_*.jsonl.gz")):
        if steps is None or int(path.name.removeprefix("step_").partition(".")[0]) <= steps:
            shutil.copyfile(path, to / "episodes" / path.name)
    (to / "eval").mkdir()
    for path in sorted((folder.path / "eval").glob("*.json")):
        shutil.copyfile(path, to / "eval" / path.name)
    write_json(to / RECORDED_DIGESTS, checkpoint_digests(folder.path))
    recorded = folder.record.model_copy(update={"lineage": folder.lineage("recording")})
    write_json(to / "run.json", recorded.model_dump(mode="json"))


def _is_kept(line: dict[str, object], steps: int | None) -> bool:
    return steps is None or line["stage"] != "grpo" or int(str(line["step"])) <= steps
