"""A recording: a run folder without weights, small enough for version control.

    run.json config.json overrides.txt
    metrics.jsonl episodes/ eval/          copied, with the images of the episodes
    checkpoints.json                       the sha256 of every checkpoint's files

Of `eval/`, these are the reports that the run itself has written, not those of later evaluations.
`reproduce` accepts a recording in place of its run. Nothing is overwritten.
"""

from pathlib import Path

from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.reproduce.comparing import (
    RECORDED_DIGESTS,
    check_begins_anew,
    checkpoint_digests,
)
from openenv_pipe.runs.episodes import iterate_episodes
from openenv_pipe.runs.evals import is_of_run, read_report, report_paths
from openenv_pipe.runs.find import find_run
from openenv_pipe.runs.images import write_images
from openenv_pipe.runs.metrics import parse_record, read_lines
from openenv_pipe.system.files import copy_file, write_bytes, write_json, write_text


def record(name: str, to: Path, *, steps: int | None, runs_dir: Path | None) -> None:
    folder = find_run(name, runs_dir)
    check_begins_anew(folder)
    path = folder.metrics_path
    records = ((line, parse_record(path, number, line)) for number, line in read_lines(path))
    kept = [
        line
        for line, record in records
        if steps is None or record["stage"] != "grpo" or record["step"] <= steps
    ]
    if not kept:
        raise RunFolderError(f"{folder.path} has no step yet, so there is nothing to record")
    config, digests = folder.config_bytes, checkpoint_digests(folder.path)
    try:
        to.mkdir(parents=True)
    except OSError as error:
        raise RunFolderError(f"cannot write the recording {to}: {error}") from None
    write_bytes(to / "config.json", config)
    write_text(to / "overrides.txt", "".join(f"{word}\n" for word in folder.overrides))
    write_bytes(to / "metrics.jsonl", b"".join(line + b"\n" for line in kept))
    (to / "episodes").mkdir()
    for path in sorted((folder.path / "episodes").glob("step_*.jsonl.gz")):
        step = path.name.removeprefix("step_").removesuffix(".jsonl.gz")
        if steps is None or (step.isdecimal() and int(step) <= steps):
            write_images(to, (each.episode for each in iterate_episodes(path)))
            copy_file(path, to / "episodes" / path.name)
    (to / "eval").mkdir()
    for path in report_paths(folder.path):
        report = read_report(path)  # checks it, and that it is not too large
        if is_of_run(path.stem) and (steps is None or (report.step or 0) <= steps):
            copy_file(path, to / "eval" / path.name)
    write_json(to / RECORDED_DIGESTS, digests)
    recorded = folder.record.model_copy(update={"lineage": folder.lineage("recording")})
    write_json(to / "run.json", recorded.model_dump(mode="json"))
