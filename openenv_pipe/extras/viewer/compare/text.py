"""A comparison as a table for a terminal, and as text: Markdown, CSV or JSON."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.text import Text

from openenv_pipe.extras.viewer.compare.grouping import Comparison, Figure, Setting, value_text
from openenv_pipe.extras.viewer.compare.load import FoundRun
from openenv_pipe.system.files import dump_json
from openenv_pipe.system.markdown import UNKNOWN, percent_text, table
from openenv_pipe.system.tables import Column, Fit, Table
from openenv_pipe.system.untrusted_text import for_markdown, for_people, visible

MAX_KEYS = 6  # columns of keys in the table for a terminal; the other forms have all
MAX_SETTINGS = 20  # that Python shows of a comparison; the other forms have all
MEANS = ("success", "reward")  # the measures that Python shows
PERCENTAGES = ("success", "pass@")  # measures shown in percent


def as_text(comparison: Comparison, form: str) -> str:
    if form == "md":
        return _as_markdown(comparison) + "\n"
    return visible(_as_csv(comparison) if form == "csv" else dump_json(_as_values(comparison)))


def figure_text(measure: str, figure: Figure | None) -> str:
    """Format as `96% [94, 98]` for percentages, else `1.31 [1.20, 1.42]`."""
    if figure is None:
        return UNKNOWN
    shown = percent_text if measure.startswith(PERCENTAGES) else "{:.2f}".format
    if figure.low is None or figure.high is None:
        return shown(figure.mean)
    low, high = (shown(limit).removesuffix("%") for limit in (figure.low, figure.high))
    return f"{shown(figure.mean)} [{low}, {high}]"


def verdict(comparison: Comparison) -> list[str]:
    """Return sentences on the best setting and how certain that is."""
    lines = []
    if comparison.best and comparison.best_run:
        success = figure_text("success", comparison.best.figures["success"])
        setting = f", of {comparison.best.name}" if comparison.keys else ""
        over = comparison.best.figures["success"].over
        among = f" over its {over}" if over == "seeds" else ""
        lines.append(f"best: {comparison.best_run.id}{setting}: success {success}{among}")
    if comparison.not_told_apart:
        names = "; ".join(setting.name for setting in comparison.not_told_apart)
        lines.append(f"not told apart from it in success: {names}")
    return [*lines, *comparison.notes]


def short_lines(comparison: Comparison) -> list[str]:
    """Return a line for each setting, and the verdict: what Python shows of a comparison."""
    lines = []
    for setting in comparison.settings[:MAX_SETTINGS]:
        figures = (f"{name} {figure_text(name, setting.figures.get(name))}" for name in MEANS)
        lines.append(f"{setting.name} ({setting.ids}, {setting.statuses}): {', '.join(figures)}")
    if (num_more := len(comparison.settings) - MAX_SETTINGS) > 0:
        lines.append(f"and {num_more} more; to_pandas() has all")
    num_lost = len(comparison.unreadable) + len(comparison.lost_jobs)
    if num_lost:
        lines.append(f"unreadable, or without a run: {num_lost}; print() shows them")
    return [*map(for_people, [*lines, *verdict(comparison)])]


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """Return a record for each setting, with full keys and three numbers for each measure."""
    found = []
    for setting in comparison.settings:
        record = {key: setting.values.get(key) for key in comparison.keys}
        record["runs"] = " ".join(run.id for run in setting.runs)
        record["statuses"] = setting.statuses
        record["seeds"] = len(setting.counted)
        for name in comparison.measures:
            figure = setting.figures.get(name)
            record[name] = figure.mean if figure else None
            record[f"{name} low"] = figure.low if figure else None
            record[f"{name} high"] = figure.high if figure else None
        found.append(record)
    return found


def run_line(run: FoundRun) -> str:
    steps = f" at step {run.step} of {run.num_steps}" if run.num_steps is not None else ""
    cause = f": {run.cause.splitlines()[0]}" if run.cause else ""
    return f"{run.id} {run.status}{steps}{cause}"


def intervals_text(comparison: Comparison) -> str:
    kinds = {f.over for s in comparison.settings for f in s.figures.values() if f.low is not None}
    if kinds == {"seeds"}:
        return "95% intervals over seeds (Student's t)"
    if kinds == {"tasks"}:
        return "intervals over eval tasks: one seed each"
    return "intervals over seeds (Student's t, 95%), or over eval tasks where there is one seed"


def headings(comparison: Comparison) -> list[str]:
    return [
        *(comparison.labels[key] for key in comparison.keys),
        "runs",
        "seeds",
        *comparison.measures,
    ]


def cells(comparison: Comparison, setting: Setting) -> list[str]:
    values = [
        value_text(setting.values[key]) if key in setting.values else UNKNOWN
        for key in comparison.keys
    ]
    figures = [figure_text(name, setting.figures.get(name)) for name in comparison.measures]
    return [*values, setting.statuses, str(len(setting.counted)), *figures]


def as_table(comparison: Comparison) -> Group:
    """Return a comparison for a terminal: the table, and sentences below it."""
    columns, num_keys = _columns(comparison), len(comparison.keys)
    keep = [i for i in range(len(columns)) if not MAX_KEYS <= i < num_keys]
    shown = Table(Column("", fit=Fit.FOLD), *(columns[i] for i in keep))
    for setting in comparison.settings:
        row = cells(comparison, setting)
        mark = "*" if setting is comparison.best else ""
        shown.add_row(f"{mark}{setting.ids}", *(row[i] for i in keep))
    lines = []
    if hidden := len(columns) - len(keep):
        lines.append(f"{hidden} more keys differ: --format md, csv or json has them all")
    if comparison.settings:
        lines.append(f"\n{intervals_text(comparison)}")
    lines += verdict(comparison)
    problems = [*map(run_line, comparison.unfinished), *comparison.lost_jobs]
    return Group(shown, *map(Text, lines), *(Text(problem, "red") for problem in problems))


def _columns(comparison: Comparison) -> list[Column]:
    """Return a column for each heading; the first two measures matter most, then the keys."""
    keys = [
        Column(comparison.labels[key], 2 + position, Fit.FOLD)
        for position, key in enumerate(comparison.keys)
    ]
    last = 2 + len(keys) + len(comparison.measures)
    measures = [
        Column(name, position if position < 2 else len(keys) + position, justify="right")
        for position, name in enumerate(comparison.measures)
    ]
    return [*keys, Column("runs", last + 1, Fit.FOLD), Column("seeds", last), *measures]


def _as_markdown(comparison: Comparison) -> str:
    titles = ["", *headings(comparison)]
    rows = [[setting.ids, *cells(comparison, setting)] for setting in comparison.settings]
    shown = table([*map(for_markdown, titles)], [[*map(for_markdown, row)] for row in rows])
    lines = [intervals_text(comparison) + ".", *verdict(comparison)]
    lines += [*map(run_line, comparison.unfinished), *comparison.lost_jobs]
    return "\n\n".join([shown, *map(for_markdown, lines)])


def _as_csv(comparison: Comparison) -> str:
    """Return a row per setting, with full keys and three columns per measure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = [f"{name}{end}" for name in comparison.measures for end in ("", " low", " high")]
    writer.writerow([*comparison.keys, "runs", "statuses", "seeds", *figures])
    for setting, record in zip(comparison.settings, records(comparison), strict=True):
        keys = [value_text(setting.values[k]) if k in setting.values else ""
                for k in comparison.keys]  # fmt: skip
        writer.writerow([*keys, *[*record.values()][len(keys) :]])
    return text.getvalue()


def _as_values(comparison: Comparison) -> dict[str, Any]:
    return {
        "title": comparison.title,
        "best": comparison.best_run.id if comparison.best_run else None,
        "best_setting": comparison.best.name if comparison.best else None,
        "not_told_apart": [setting.name for setting in comparison.not_told_apart],
        "keys": list(comparison.keys),
        "settings": [
            {
                "name": setting.name,
                "values": dict(setting.values),
                "figures": {name: asdict(figure) for name, figure in setting.figures.items()},
                "runs": _runs(setting.runs),
            }
            for setting in comparison.settings
        ],
        "unreadable": _runs(comparison.unreadable),
        "lost_jobs": list(comparison.lost_jobs),
        "notes": list(comparison.notes),
    }


def _runs(runs: Sequence[FoundRun]) -> list[dict[str, Any]]:
    return [
        {
            "id": run.id,
            "path": str(run.path),
            "status": run.status,
            "cause": run.cause,
            "seed": run.seed,
            "step": run.step,
            "num_steps": run.num_steps,
            "success": run.final.success.mean if run.final and run.final.success else None,
            "reward": run.final.reward.mean if run.final and run.final.reward else None,
        }
        for run in runs
    ]
