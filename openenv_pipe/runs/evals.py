"""eval/: one JSON file for each evaluation report of a run.

A report is never overwritten: a second one of the same label is written as `trained_2.json`.
"""

from itertools import count
from pathlib import Path

from pydantic import ValidationError

from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.files import dump_json, read_json, write_text
from openenv_pipe.scoring import EvalReport

STAGES = ("start", "warm_start", "trained")  # labels that the pipeline itself writes, in order


def save_report(folder: Path, report: EvalReport) -> Path:
    """Write a report under its label; a file with the same content is left as it is."""
    text = dump_json(report.model_dump(mode="json"))
    for number in count(1):
        name = report.label if number == 1 else f"{report.label}_{number}"
        path = folder / "eval" / f"{name}.json"
        if not path.exists():
            write_text(path, text)
            return path
        if path.read_text(encoding="utf-8") == text:
            return path
    raise AssertionError("numbers do not end")


def read_report(path: Path) -> EvalReport:
    """One report; raises RunFolderError if it is missing or damaged."""
    try:
        return EvalReport.model_validate(read_json(path))
    except ValidationError as error:
        raise RunFolderError(f"{path} is not an eval report: {error}") from error


def read_reports(folder: Path) -> dict[str, EvalReport]:
    """All reports of a run by their file's name without `.json`: the stages first, in order."""
    paths = {path.stem: path for path in sorted((folder / "eval").glob("*.json"))}
    names = [name for name in STAGES if name in paths]
    names += [name for name in paths if name not in STAGES]
    return {name: read_report(paths[name]) for name in names}
