"""Plot the learning curves of several settings: a line per setting, a band over its seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from openenv_pipe.reports.compare.grouping import Comparison, Setting
from openenv_pipe.reports.plots import canvas, smooth, smoothing_window
from openenv_pipe.system.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The colours of Okabe and Ito, which most people can tell apart; after them the line style changes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#2b2f36", "#a6a63a")
LINES = ("-", "--", ":", "-.")
PANELS = {"Train reward": "reward/mean", "Train success rate": "success/rate"}
MAX_LABEL_LENGTH = 60  # characters


def draw_curves(path: Path, comparison: Comparison) -> bool:
    """Plot the curves; return False, and write no file, without any step or evaluation."""
    drawn = [s for s in comparison.settings if any(run.steps or run.reports for run in s.runs)]
    if not drawn:
        return False
    with canvas(path, 1, [1.0] * (len(PANELS) + 1)) as axes:
        for number, setting in enumerate(drawn):
            look = {
                "color": COLOURS[number % len(COLOURS)],
                "linestyle": LINES[number // len(COLOURS) % len(LINES)],
            }
            label = _label(comparison, setting)
            for axis, key in zip(axes, PANELS.values(), strict=False):
                _draw_train(axis, setting, key, look)
            _draw_evals(axes[-1], setting, look, label)
        for axis, title in zip(axes, [*PANELS, "Eval success rate"], strict=True):
            axis.set_title(title)
            axis.set_xlabel("GRPO step")
            axis.locator_params(axis="x", integer=True)
        for axis in axes[1:]:
            axis.set_ylim(-0.04, 1.04)
        figure = axes[0].figure
        num_columns = 1 if max(len(_label(comparison, s)) for s in drawn) > 40 else 3
        figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center",
                      ncols=num_columns)  # fmt: skip
    return True


def _label(comparison: Comparison, setting: Setting) -> str:
    text = setting.name if len(setting.name) <= MAX_LABEL_LENGTH else setting.runs[0].id
    seeds = f" ({len(setting.runs)} runs)" if len(setting.runs) > 1 else ""
    return text + seeds + (", best" if setting is comparison.best else "")


def _draw_train(axis: "Axes", setting: Setting, key: str, look: Mapping[str, Any]) -> None:
    """Plot the smoothed mean over runs, and the range between the lowest and highest."""
    by_step: dict[int, list[float]] = {}
    for run in setting.runs:
        for step, value in _smoothed(run.steps, key):
            by_step.setdefault(step, []).append(value)
    if not by_step:
        return
    steps = sorted(by_step)
    marker = "o" if len(steps) == 1 else None
    axis.plot(steps, [numpy.mean(by_step[s]) for s in steps], linewidth=1.8, marker=marker, **look)
    if len(setting.runs) > 1:
        low, high = ([pick(by_step[s]) for s in steps] for pick in (min, max))
        axis.fill_between(steps, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _smoothed(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    if not points:
        return []
    values = smooth(numpy.array([value for _, value in points]), smoothing_window(len(points)))
    return [(step, float(value)) for (step, _), value in zip(points, values, strict=True)]


def _draw_evals(axis: "Axes", setting: Setting, look: Mapping[str, Any], label: str) -> None:
    """Plot the mean over runs at each step that has an evaluation.

    Bars span the lowest and highest run; for a single run, its interval over tasks.
    """
    by_step: dict[int, list[Interval]] = {}
    for run in setting.runs:
        at_step = {r.step: r.success for r in run.reports if r.step is not None and r.success}
        for step, interval in at_step.items():  # For equal steps the later: after the warm start.
            by_step.setdefault(step, []).append(interval)
    single = len(setting.runs) == 1
    points = []
    for step, intervals in sorted(by_step.items()):
        mean = float(numpy.mean([interval.mean for interval in intervals]))
        low = min(interval.mean for interval in intervals)
        high = max(interval.mean for interval in intervals)
        if single and intervals[0].low is not None and intervals[0].high is not None:
            low, high = intervals[0].low, intervals[0].high
        points.append((step, mean, max(mean - low, 0.0), max(high - mean, 0.0)))
    steps, means, below, above = zip(*points, strict=True) if points else [()] * 4
    axis.errorbar(
        steps, means, yerr=[below, above], marker="o", markersize=4.5, capsize=3,
        elinewidth=1.2, label=label, **look,
    )  # fmt: skip
