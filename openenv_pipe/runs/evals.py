"""The folder eval/ of a run, with three files for each evaluation:

    trained.json       the report: means with intervals, and the scores of each task
    trained.md         the same to read, with the best and the worst episodes
    trained.jsonl.gz   every episode with its tokens, in the format of `episodes/`

The report is written last, so an evaluation with a report is complete. None is overwritten: a
second one of the same label is `trained_2`, unless it is equal.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from openenv_pipe.config.error_messages import first_problem
from openenv_pipe.errors import RunFolderError
from openenv_pipe.registry import extras, load
from openenv_pipe.runs.episodes import write_episodes
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.system.budgets import REPORT, REPORTS, Account
from openenv_pipe.system.files import dump_json, names_in, parse_json, read_bytes, write_text
from openenv_pipe.types import Group

STAGES = ("start", "warm_start", "trained")  # labels that the pipeline writes, in order
GREEDY = "_greedy"  # suffix of the same model's label at temperature 0
BASELINE = "baseline_"  # prefix of a scripted policy's label
DURING = "during_"  # prefix of an evaluation between steps, followed by the step's number
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    report: EvalReport
    groups: Sequence[Group]
    duration_s: float | None = None  # None: nothing was played


def label_in(label: str, env: str) -> str:
    """Return the label of an evaluation in an environment of `beside`: `trained.echo`."""
    return f"{label}.{env}" if env else label


def env_of(label: str) -> str:
    """Return the environment that a label names; an empty text for the first one's."""
    return label.partition(".")[2]


def eval_episodes_path(folder: Path, name: str) -> Path:
    return folder / "eval" / f"{name}.jsonl.gz"


def save_evaluation(folder: Path, evaluation: Evaluation) -> Path:
    """Write an evaluation under its label and return the report's path.

    An equal one that exists already is left as it is.
    """
    report = evaluation.report
    text = dump_json(report.model_dump(mode="json"))
    (folder / "eval").mkdir(exist_ok=True)
    for number in count(1):
        name = report.label if number == 1 else f"{report.label}_{number}"
        path = folder / "eval" / f"{name}.json"
        if not path.exists():
            write_episodes(eval_episodes_path(folder, name), evaluation.groups)
            for page in [load(each.eval_page) for each in extras() if each.eval_page]:
                write_text(path.with_name(f"{name}.md"), page(name, report, evaluation.groups))
            write_text(path, text)
            _log.info("saved the evaluation %s", path)
            return path
        if _has(path, text.encode(errors="backslashreplace")):
            return path
    raise AssertionError("an endless loop ended")


def _has(path: Path, content: bytes) -> bool:
    try:
        return read_bytes(path, REPORT.max_mb) == content
    except RunFolderError:
        return False


def read_report(path: Path, account: Account | None = None) -> EvalReport:
    """Read one report. Raises RunFolderError if it is missing, damaged, or too large.

    account: of all reports that the caller reads.
    """
    content = read_bytes(path, REPORT.max_mb)
    if account is not None:
        account.spend(path, content)
    try:
        return EvalReport.model_validate(parse_json(path, content, REPORT))
    except ValidationError as error:
        raise RunFolderError(
            f"{path} is not an eval report of this version: {first_problem(error)}"
        ) from error


def read_reports(folder: Path) -> dict[str, EvalReport]:
    """Read the reports of a run, without those during training, by file name without `.json`.

    The order is: the stages, then the results of `eval`, then scripted policies. A damaged report
    is left out with a warning.
    """
    return {path.stem: report for path, report in _read_sound(folder) if not _is_during(path)}


def read_stages(folder: Path) -> dict[str, EvalReport]:
    """Read the newest report of each stage; a resumed run may have several of the last one."""
    reports = read_reports(folder).values()  # Of equal labels, the newer comes later.
    return {report.label: report for report in reports if report.label in STAGES}


def is_outdated(report: EvalReport, records: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a run has trained on since it evaluated what was then its last model.

    A run that is extended keeps that evaluation, also while it has no newer one.

    records: of its metrics
    """
    stage = report.label.removesuffix(f".{env_of(report.label)}").removesuffix(GREEDY)
    if stage != STAGES[-1] or report.step is None:
        return False
    steps = (record["step"] for record in records if record.get("stage") == "grpo")
    return report.step < max(steps, default=0)


def during_by_name(folder: Path) -> dict[str, EvalReport]:
    """Read the newest report of each step and environment, by file name without `.json`."""
    # `report_paths` gives them in the order of steps.
    newest = {
        (report.step, env_of(report.label)): (path.stem, report)
        for path, report in _read_sound(folder)
        if _is_during(path)
    }
    return dict(newest.values())


def read_during(folder: Path) -> list[EvalReport]:
    """Read the newest report of each evaluation of `env` between steps, by step."""
    return [report for report in during_by_name(folder).values() if not env_of(report.label)]


def report_paths(folder: Path) -> list[Path]:
    """List the files of a run's reports, in the order of `read_reports`."""
    names = [name for name in names_in(folder / "eval") if name.endswith(".json")]
    return sorted((folder / "eval" / name for name in names), key=lambda path: place_of(path.stem))


def _read_sound(folder: Path) -> Iterator[tuple[Path, EvalReport]]:
    account = Account(REPORTS)
    for path in report_paths(folder):
        try:
            yield path, read_report(path, account)
        except RunFolderError as error:
            _log.warning("an evaluation is left out: %s", error)


def _is_during(path: Path) -> bool:
    return path.stem.startswith(DURING)


def is_of_run(name: str) -> bool:
    """Return whether a report, named as in `read_reports`, is the run's own and not of `eval`."""
    # `eval` plays the baselines again, and saves a result that differs under another number.
    kind, _, label, number = place_of(name)
    return kind == 0 or (label.startswith(BASELINE) and number == 1)


def place_of(name: str) -> tuple[int, int, str, int]:
    """Return a report's sort key for lists. name: of its file, without `.json`."""
    label, number = name, 1
    # A number with fewer digits than a step's six counts the reports of one label.
    if numbered := re.fullmatch(r"(.*\D|.*_\d{6})_(\d{1,5})", name):
        label, number = numbered[1], int(numbered[2])
    first = label.removesuffix(f".{env_of(label)}")
    stage = first.removesuffix(GREEDY)
    if stage in STAGES:
        return 0, 2 * STAGES.index(stage) + (stage != first), label, number
    if label.startswith(DURING):
        return 0, 2 * STAGES.index("trained"), label, number
    return (2 if label.startswith(BASELINE) else 1), 0, label, number
