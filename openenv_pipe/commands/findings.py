"""What a check found, line by line: a table for people, JSON for programs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from rich.markup import escape
from rich.table import Table

from openenv_pipe.errors import FailureError, PipeError


class Result(StrEnum):
    """What a check says."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


STYLES = {Result.OK: "green", Result.WARN: "yellow", Result.FAIL: "bold red"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report."""

    name: str
    result: Result
    text: str
    measured: Mapping[str, float] = field(default_factory=dict)  # the text's numbers, by name


def failed(name: str, error: PipeError) -> Line:
    """The line of a check that met an error.

    Without the path of a log that is deleted by now; its last lines are in the message.
    """
    log = error.log if isinstance(error, FailureError) else None
    return Line(name, Result.FAIL, str(error).replace(f" (log: {log})", ""))


def has_failed(lines: Sequence[Line]) -> bool:
    """True if a line says so: the exit code."""
    return any(line.result is Result.FAIL for line in lines)


def as_table(lines: Sequence[Line]) -> Table:
    """The report for a terminal."""
    table = Table("check", "result", box=None, header_style="bold")
    table.add_column("what was found", overflow="fold")
    for line in lines:
        style = STYLES[line.result]
        table.add_row(line.name, f"[{style}]{line.result}[/]", escape(line.text))
    return table


def as_json(lines: Sequence[Line]) -> str:
    """The report for programs: {"failed": ..., "lines": [{"name", "result", "text", ...}]}."""
    report = {"failed": has_failed(lines), "lines": [asdict(line) for line in lines]}
    return json.dumps(report, indent=2)
