"""What a run is doing now, as lines of text, from its folder alone."""

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from openenv_pipe.reports.alarms import find_alarms
from openenv_pipe.reports.eval_table import eval_warnings, scores_text
from openenv_pipe.runs.evals import read_reports
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.system.progress import clock, step_numbers
from openenv_pipe.system.untrusted_text import for_people

WINDOW = 10  # last steps over which the pace is averaged
WIDTH = 40  # steps, or means of several, in a curve
BARS = "▁▂▃▄▅▆▇█"
CURVES = ("reward/mean", "success/rate", "sampling/entropy")


class RunState:
    """Reads a run folder again each time that it is asked. Raises RunFolderError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_told = 0
        self._last_status = ""
        self.has_ended = False

    def new_lines(self) -> list[str]:
        """Return a line for each step since the last call, and one if the status has changed."""
        folder, records = self._read()
        totals = _total_steps(folder)
        lines = [
            " ".join([_title(record, totals), *step_numbers(record)])
            for record in records[self._num_told :]
        ]
        self._num_told = len(records)
        if folder.status != self._last_status:
            self._last_status = folder.status
            lines.append(_headline(folder))
        return lines

    def image(self) -> list[str]:
        """Return the lines that show the whole state: status, progress, numbers, curves, alarms."""
        folder, records = self._read()
        lines = [_headline(folder)]
        if records:
            totals = _total_steps(folder)
            steps = [record for record in records if record["stage"] == records[-1]["stage"]]
            lines.append(f"{_title(records[-1], totals)} · {self._left(folder, steps, totals)}")
            lines.append(" · ".join(step_numbers(records[-1])))
            lines += _curves(steps)
        for label, report in read_reports(folder.path).items():
            if report.error is None:
                lines.append(f"eval {label}: {scores_text(report)}")
            lines += [f"! eval {label}: {each}" for each in eval_warnings(report, folder.path)]
        alarms = find_alarms(records, folder.written_config.trainer.max_mismatch)
        lines += [f"! {alarm.what}; {alarm.advice}" for alarm in alarms]
        return [for_people(line) for line in lines]

    def _read(self) -> tuple[RunFolder, list[dict[str, Any]]]:
        folder = RunFolder.open(self._path)
        self.has_ended = folder.status != "running"  # before the metrics, so that none is missed
        return folder, read_metrics(folder.metrics_path)

    def _left(
        self, folder: RunFolder, steps: Sequence[dict[str, Any]], totals: dict[str, int]
    ) -> str:
        if self.has_ended:
            return f"took {clock(folder.duration_s)}"
        last = steps[-1]
        paces = [step["time/step_s"] for step in steps[-WINDOW:] if step.get("time/step_s")]
        num_left = max(totals.get(last["stage"], 0) - last["step"], 0)
        left = f"left {clock(fmean(paces) * num_left)}" if paces else "left: unknown"
        since_s = max(time.time() - folder.metrics_path.stat().st_mtime, 0.0)
        return f"{left} · last step {clock(since_s)} ago"


def _headline(folder: RunFolder) -> str:
    cause = f": {folder.record.cause}" if folder.record.cause else ""
    return for_people(f"{folder.record.id} {folder.status}{cause}")


def _total_steps(folder: RunFolder) -> dict[str, int]:
    trainer = folder.written_config.trainer
    return {"warm_start": trainer.warm_start.steps, "grpo": trainer.steps}


def _title(record: dict[str, Any], totals: dict[str, int]) -> str:
    stage = record["stage"]
    return for_people(f"{stage} {record['step']}/{totals.get(stage, '?')}")


def _curves(steps: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for name in CURVES:
        values = [float(step[name]) for step in steps if step.get(name) is not None]
        if len(values) > 1:
            ends = f"{values[0]:.3g} .. {values[-1]:.3g}"
            lines.append(f"{name:<14}{_curve(values)}  {ends}")
    return lines


def _curve(values: Sequence[float]) -> str:
    """Draw values as bars, as means of neighbours if there are more than fit."""
    width = min(WIDTH, len(values))
    bounds = [index * len(values) // width for index in range(width + 1)]
    means = [fmean(values[low:high]) for low, high in pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in means)
