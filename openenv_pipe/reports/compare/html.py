"""A comparison as one HTML page with the plot inside and no network access or script.

Its content policy forbids loading anything, so that a page can be mailed and opened anywhere.
"""

import base64
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from openenv_pipe.reports.compare.grouping import Comparison, Setting, value_text
from openenv_pipe.reports.compare.load import FoundRun
from openenv_pipe.reports.compare.text import cells, headings, intervals_text, verdict
from openenv_pipe.system.foreign_text import for_html as escape
from openenv_pipe.system.markdown import UNKNOWN
from openenv_pipe.system.progress import clock

STYLE = """
:root { color-scheme: light dark; --ink: #23272e; --dim: #6b7078; --line: #e3e6ea; --back: #fff;
  --best: #e8f4ec; --card: #f6f7f9; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --dim: #9aa1aa; --line: #343941;
  --back: #16191d; --best: #1d3326; --card: #1f2329; --bad: #ff8a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 76rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: .3rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.best { background: var(--best); border-radius: 8px; padding: .7rem 1rem; }
.best p { margin: .2rem 0; } .dim { color: var(--dim); } .bad { color: var(--bad); }
.wide { overflow-x: auto; } table { border-collapse: collapse; white-space: nowrap; }
th, td { text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } .number { text-align: right; font-variant-numeric: tabular-nums; }
.status { white-space: normal; min-width: 14rem; overflow-wrap: anywhere; }
tr.best-row td { background: var(--best); }
img { width: 100%; background: #fff; border-radius: 8px; }
pre { background: var(--card); padding: .7rem 1rem; border-radius: 8px; overflow-x: auto; }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(comparison: Comparison, picture: Path | None, folder: Path) -> str:
    """Return the page. picture: a PNG to embed; folder: where the page will be, for its links."""
    num_runs = sum(len(setting.runs) for setting in comparison.settings)
    parts = [
        f"<h1>{escape(comparison.title)}</h1>",
        f'<p class="dim">{num_runs} runs of {len(comparison.settings)} settings</p>',
        _verdict(comparison),
        "<h2>Settings</h2>",
        _settings_table(comparison),
        f'<p class="dim">{escape(intervals_text(comparison))}. Train reward: the mean of the last '
        "tenth of the steps.</p>",
        _picture(picture),
        "<h2>Runs</h2>",
        _runs_table(comparison, folder),
        _lost(comparison.lost_jobs),
        _alike(comparison),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(comparison.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _verdict(comparison: Comparison) -> str:
    lines = verdict(comparison) or ["no run has a final evaluation yet, so none is the best"]
    return f'<div class="best">{"".join(f"<p>{escape(line)}</p>" for line in lines)}</div>'


def _settings_table(comparison: Comparison) -> str:
    num_keys = len(comparison.keys)
    full = [*comparison.keys, *[""] * (len(headings(comparison)) - num_keys)]
    titles = "".join(
        f'<th title="{escape(key)}"{_number(place > num_keys)}>{escape(name)}</th>'
        for place, (key, name) in enumerate(zip(full, headings(comparison), strict=True))
    )
    rows = [
        _row(
            (
                f"<td{_number(place > num_keys)}>{escape(cell)}</td>"
                for place, cell in enumerate(cells(comparison, setting))
            ),
            is_best=setting is comparison.best,
        )
        for setting in comparison.settings
    ]
    return f'<div class="wide"><table><tr>{titles}</tr>{"".join(rows)}</table></div>'


def _picture(picture: Path | None) -> str:
    if picture is None:
        return ""
    data = base64.b64encode(picture.read_bytes()).decode()
    text = "train reward, train success and eval success over the steps, a line for each setting"
    return f'<h2>Learning curves</h2>\n<img alt="{text}" src="data:image/png;base64,{data}">'


def _runs_table(comparison: Comparison, folder: Path) -> str:
    titles = ("run", "setting", "seed", "steps", "took", "success", "reward", "status")
    numbers = ("seed", "steps", "took", "success", "reward")
    head = "".join(f"<th{_number(title in numbers)}>{title}</th>" for title in titles)
    rows = [
        _run_row(run, setting, folder, is_best=run is comparison.best_run)
        for setting in comparison.settings
        for run in setting.runs
    ]
    rows += [_run_row(run, None, folder, is_best=False) for run in comparison.unreadable]
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _run_row(run: FoundRun, setting: Setting | None, folder: Path, *, is_best: bool) -> str:
    link = escape(os.path.relpath(run.path / "report.md", folder))
    look = "status" if run.status in ("finished", "running") else "status bad"
    cause = f": {run.cause.splitlines()[0]}" if run.cause else ""
    success = f"{run.final.success.mean:.0%}" if run.final and run.final.success else UNKNOWN
    reward = f"{run.final.reward.mean:.2f}" if run.final and run.final.reward else UNKNOWN
    numbers = [
        f"{run.step}/{run.num_steps}" if run.num_steps is not None else UNKNOWN,
        UNKNOWN if run.duration_s is None else clock(run.duration_s),
        success,
        reward,
    ]
    seed = UNKNOWN if run.seed is None else str(run.seed)
    return _row(
        [
            f'<td><a href="{link}">{escape(run.id)}</a></td>',
            f"<td>{escape(setting.name) if setting else UNKNOWN}</td>",
            f'<td class="number">{seed}</td>',
            *(f'<td class="number">{number}</td>' for number in numbers),
            f'<td class="{look}">{escape(run.status + cause)}</td>',
        ],
        is_best=is_best,
    )


def _lost(jobs: Sequence[str]) -> str:
    items = "".join(f'<li class="bad">{escape(job)}</li>' for job in jobs)
    return f"<h2>Jobs without a run</h2>\n<ul>{items}</ul>" if jobs else ""


def _alike(comparison: Comparison) -> str:
    """List what all runs have in common, folded."""
    runs = [run for setting in comparison.settings for run in setting.runs]
    if not runs:
        return ""
    common = {k: v for k, v in runs[0].settings.items() if k not in comparison.keys}
    lines = "\n".join(escape(f"{key}={value_text(value)}") for key, value in common.items())
    return f"<details><summary>Equal in all of them</summary><pre>{lines}</pre></details>"


def _row(parts: Iterable[str], *, is_best: bool) -> str:
    return f"<tr{' class=best-row' if is_best else ''}>{''.join(parts)}</tr>"


def _number(is_number: bool) -> str:
    return ' class="number"' if is_number else ""
