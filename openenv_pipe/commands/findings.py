"""The findings of a check, line by line: as a table for people, as JSON for programs."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from rich.text import Text

from openenv_pipe.errors import FailureError, PipeError, UserError
from openenv_pipe.system.files import write_bytes
from openenv_pipe.system.secrets import redact
from openenv_pipe.system.tables import Column, Fit, Table
from openenv_pipe.system.untrusted_text import for_people


class Result(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


STYLES = {Result.OK: "green", Result.WARN: "yellow", Result.FAIL: "bold red"}


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    result: Result
    text: str
    measured: Mapping[str, float] = field(default_factory=dict)  # the text's numbers by name
    duration_s: float | None = None  # of what was tried; None: it is not known


class Stopwatch:
    """Gives each line of a check the time since the line before it."""

    def __init__(self) -> None:
        self._before_s = time.monotonic()

    def lap(self, line: Line) -> Line:
        before_s, self._before_s = self._before_s, time.monotonic()
        return replace(line, duration_s=self._before_s - before_s)


def failed(name: str, error: PipeError) -> Line:
    """Make the line of a check that raised an error.

    The path of the log is removed, because the log is deleted by then; the message quotes its end.
    """
    log = error.log if isinstance(error, FailureError) else None
    return Line(name, Result.FAIL, str(error).replace(f" (log: {log})", ""))


def has_failed(lines: Sequence[Line]) -> bool:
    """Return whether any line has failed, which decides the exit code."""
    return any(line.result is Result.FAIL for line in lines)


def as_table(lines: Sequence[Line]) -> Table:
    table = Table(Column("check"), Column("result"), Column("what was found", fit=Fit.FOLD))
    for line in lines:
        style = STYLES[line.result]
        table.add_row(line.name, Text(line.result, style), for_people(line.text))
    return table


def verdict(line: Line) -> str:
    """Return a line as text: `FAIL my_env/0001 trained: reward 0.519 < 0.6`."""
    return redact(f"{line.result.upper()} {for_people(line.name)} {for_people(line.text)}")


def as_json(lines: Sequence[Line]) -> str:
    """Format the lines as {"failed": ..., "lines": [{"name", "result", "text", ...}]}."""
    report = {"failed": has_failed(lines), "lines": [asdict(line) for line in lines]}
    return redact(json.dumps(report, indent=2))


def write_junit(path: Path, suite_name: str, lines: Sequence[Line]) -> None:
    """Write a suite with a test case for each line. A warning is not a failure.

    Raises UserError if the file cannot be written.
    """
    failures = sum(line.result is Result.FAIL for line in lines)
    counts = {"tests": str(len(lines)), "failures": str(failures), "errors": "0", "skipped": "0"}
    root = Element("testsuites", counts)
    suite = SubElement(root, "testsuite", {"name": for_people(suite_name), **counts})
    for line in lines:
        name, text = for_people(line.name), for_people(line.text)
        case = SubElement(suite, "testcase", classname=suite.attrib["name"], name=name)
        if line.duration_s is not None:
            case.set("time", f"{line.duration_s:.3f}")
        if line.result is Result.FAIL:
            SubElement(case, "failure", message=text.partition("\n")[0]).text = text
        else:
            SubElement(case, "system-out").text = f"{line.result}: {text}"
    indent(root)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, tostring(root, encoding="utf-8", xml_declaration=True) + b"\n")
    except OSError as error:
        raise UserError(f"--junit {path} cannot be written: {error}") from error
