"""eval/: three files for each evaluation of a run.

    trained.json       the report: figures with intervals, and each task's
    trained.md         the same to read, with the best and the worst episodes
    trained.jsonl.gz   every episode with all its tokens, as `episodes/` has them

The report is written last: where it is, the evaluation is whole. None is ever overwritten: a
second one of the same label is `trained_2`, unless it says the same.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from pydantic import ValidationError

from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.episodes import write_episodes
from openenv_pipe.runs.eval_page import eval_page
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.system.files import dump_json, read_json, write_text
from openenv_pipe.types import Group

STAGES = ("start", "warm_start", "trained")  # labels that the pipeline itself writes, in order
GREEDY = "_greedy"  # ends the label of the same model at temperature 0
BASELINE = "baseline_"  # begins the label of a scripted player
DURING = "during_"  # begins the label of an evaluation between steps, with the step's number


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A report and the episodes that it is about."""

    report: EvalReport
    groups: Sequence[Group]


def save_evaluation(folder: Path, evaluation: Evaluation) -> Path:
    """Write an evaluation under its label; one that is there already is left as it is."""
    report = evaluation.report
    text = dump_json(report.model_dump(mode="json"))
    (folder / "eval").mkdir(exist_ok=True)
    for number in count(1):
        name = report.label if number == 1 else f"{report.label}_{number}"
        path = folder / "eval" / f"{name}.json"
        if not path.exists():
            write_episodes(path.with_name(f"{name}.jsonl.gz"), evaluation.groups)
            write_text(path.with_name(f"{name}.md"), eval_page(name, report, evaluation.groups))
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
        raise RunFolderError(f"{path} is not an eval report of this version: {error}") from error


def read_reports(folder: Path) -> dict[str, EvalReport]:
    """The reports of a run but for those during training, by their file's name without `.json`.

    The stages come first, in order; then what `eval` has made; then the scripted players.
    """
    paths = {path.stem: path for path in (folder / "eval").glob("*.json")}
    names = [name for name in sorted(paths, key=_place) if not name.startswith(DURING)]
    return {name: read_report(paths[name]) for name in names}


def read_stages(folder: Path) -> dict[str, EvalReport]:
    """The newest report of each stage: a run that was resumed for more steps ends twice."""
    newest: dict[str, EvalReport] = {}
    for report in read_reports(folder).values():  # of one label, the newer one comes later
        if report.label in STAGES:
            newest[report.label] = report
    return newest


def read_during(folder: Path) -> list[EvalReport]:
    """The reports of evaluations between steps, by step, the newest of each."""
    paths = sorted((folder / "eval").glob(f"{DURING}*.json"), key=lambda path: _place(path.stem))
    reports = [read_report(path) for path in paths]
    return list({report.step: report for report in reports}.values())


def _place(name: str) -> tuple[int, int, str, int]:
    """Where a report stands in lists."""
    label, number = name, 1
    # A number of fewer digits than a step's six counts the reports of one label.
    if numbered := re.fullmatch(r"(.*\D|.*_\d{6})_(\d{1,5})", name):
        label, number = numbered[1], int(numbered[2])
    stage = label.removesuffix(GREEDY)
    if stage in STAGES:
        return 0, 2 * STAGES.index(stage) + (stage != label), label, number
    return (2 if label.startswith(BASELINE) else 1), 0, label, number
