"""Group runs by settings: runs that differ only in the seed are one setting, with intervals.

With several seeds an interval is over seeds (Student's t over the runs' means), else over the eval
tasks of the one run. Runs without a final evaluation are listed but not counted.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Any

from openenv_pipe.commands.thresholds import METRICS, Measured, too_few_measured
from openenv_pipe.extras.viewer.compare.load import Found, FoundRun
from openenv_pipe.reports.alarm import mean_of
from openenv_pipe.runs.differences import find_other_facts
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.notebook import data_frame
from openenv_pipe.system.intervals import FRACTIONS, Interval, interval_over_runs, paired_difference

if TYPE_CHECKING:
    from pandas import DataFrame

CONFIDENCE = 0.95  # of intervals over seeds, and of paired differences
NUM_RESAMPLES = 2000
TRAIN_SHARE = 0.1  # fraction of last steps over which the train reward is averaged
TIME = "minutes"
MIN_SHARE = "eval.min_scored_share"
ABSENT = "(absent)"  # the value of a key that the blocks of a run do not have
FIRST_BLOCKS = ("trainer", "model", "reward")  # what people change; a terminal shows few keys
# Keys that may decide what a success is.
SCORING_SETTINGS = re.compile(r"(?:beside\.[^.]+\.)?env\.(?:variables\..+|success_reward)")
DIFFERENT_TASKS = (
    "the runs were evaluated on different tasks, so none is called the best; "
    "`openenv-pipe eval RUN RUN` evaluates them on the same tasks"
)
DIFFERENT_SCORING = (
    "the runs differ in {}, which may decide what a success is, so none is called the best; "
    "`openenv-pipe eval RUN RUN` evaluates them alike"
)
TIED = "the first settings have equal success and reward, so none is called the best"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A mean; low and high are None if there is no interval."""

    mean: float
    low: float | None
    high: float | None
    over: str  # seeds or tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """All runs of one setting. `values` has the keys in which the settings differ."""

    name: str
    values: Mapping[str, Any]
    runs: Sequence[FoundRun]
    figures: Mapping[str, Figure]  # by measure

    @property
    def ids(self) -> str:
        first, *others = [run.id for run in self.runs]
        name = first.partition("/")[0]
        return " ".join([first, *(other.removeprefix(f"{name}/") for other in others)])

    @property
    def counted(self) -> list[FoundRun]:
        """The runs that are counted: for each seed the last one with a final evaluation."""
        return _counted(self.runs)

    @property
    def objections(self) -> dict[str, str]:
        """Why means decide nothing, by metric: seeds are missing, or too few tasks have it."""
        seeds = {run.seed for run in self.counted}
        if missing := [run.id for run in self.runs if run.seed not in seeds]:
            why = f"without {', '.join(missing)}, not evaluated at its end"
            return dict.fromkeys(METRICS, why)
        return {
            metric: f"{run.id} on {few}"
            for metric, run in product(METRICS, reversed(self.counted))
            if run.final and (few := too_few_measured(run.final, metric, run.settings[MIN_SHARE]))
        }

    @property
    def statuses(self) -> str:
        names = [run.status for run in self.runs]
        return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Comparison:
    """The result of `compare`: the best setting first, then by rank, then those without means."""

    title: str
    keys: Sequence[str]
    labels: Mapping[str, str]  # for the keys, shortened while they stay different
    measures: Sequence[str]
    settings: Sequence[Setting]
    best: Setting | None
    best_run: FoundRun | None
    not_told_apart: Sequence[Setting]  # those whose difference to the best may be chance
    notes: Sequence[str]
    unreadable: Sequence[FoundRun]
    lost_jobs: Sequence[str]

    @property
    def unfinished(self) -> list[FoundRun]:
        runs = [run for setting in self.settings for run in setting.runs]
        return [*(run for run in runs if run.status != "finished"), *self.unreadable]

    @property
    def measured(self) -> dict[str, Measured]:
        """The means of each setting. Unfinished runs and jobs without a run have none."""
        found = {
            setting.ids: Measured(
                means={name: figure.mean for name, figure in setting.figures.items()},
                objections=setting.objections,
                duration_s=sum(run.duration_s or 0.0 for run in setting.runs),
            )
            for setting in self.settings
        }
        lost = [*(run.id for run in self.unfinished), *self.lost_jobs]
        return {**{name: Measured(means={}) for name in lost}, **found}

    def to_pandas(self) -> "DataFrame":
        """A data frame with one row a setting. Raises ModuleNotFoundError without pandas.

        Columns: the keys in which the settings differ (missing where a run has no such key),
        `runs`, `statuses`, `seeds`, and of each measure the mean and the limits of its interval,
        such as `success`, `success low` and `success high`.
        """
        from openenv_pipe.extras.viewer.compare.text import records

        return data_frame(records(self))

    def __repr__(self) -> str:
        from openenv_pipe.extras.viewer.compare.text import short_lines

        return "\n".join(short_lines(self))

    def __str__(self) -> str:
        """Return it as Markdown, which a notebook shows as a table."""
        from openenv_pipe.extras.viewer.compare.text import as_text

        return as_text(self, "md")

    _repr_markdown_ = __str__


def compare_settings(found: Found) -> Comparison:
    """Group the runs, measure the groups, and rank them."""
    readable = [run for run in found.runs if run.status != "unreadable"]
    keys = _differing(readable)
    labels = _short_names(keys)
    groups: dict[str, list[FoundRun]] = {}
    for run in readable:
        values = json.dumps(run.values_of(keys), sort_keys=True)
        groups.setdefault(values, []).append(run)
    settings = [_measure(runs, keys, labels) for runs in groups.values()]
    settings.sort(key=_rank)
    objections = _why_none_is_best(settings, keys)
    first = settings[0] if settings and "success" in settings[0].figures else None
    best = first if first and not objections and _is_representative(first) else None
    present = {name for setting in settings for name in setting.figures}
    return Comparison(
        title=found.title,
        keys=keys,
        labels=labels,
        measures=[name for name in _measures(readable) if name in present],
        settings=settings,
        best=best,
        best_run=_best_run(best) if best else None,
        not_told_apart=[s for s in settings if best and s is not best and _may_equal(best, s)],
        notes=[
            *found.notes,
            *objections,
            *_of_other_code(settings),
            *_partly_scored(settings),
            *_without_end(readable),
        ],
        unreadable=[run for run in found.runs if run.status == "unreadable"],
        lost_jobs=found.lost_jobs,
    )


def _why_none_is_best(settings: Sequence[Setting], keys: Sequence[str]) -> list[str]:
    """Say why the first of the settings is not the best. keys: those in which they differ."""
    finals = [run.final for setting in settings for run in setting.counted]
    tasks = {frozenset(task.key for task in final.tasks) for final in finals if final}
    counted = [setting.values for setting in settings if setting.counted]
    ranks = [_rank(setting) for setting in settings[:2] if "success" in setting.figures]
    scoring = [
        key
        for key in keys
        if SCORING_SETTINGS.fullmatch(key)
        and len({json.dumps(each.get(key)) for each in counted}) > 1
    ]
    return [
        *([DIFFERENT_TASKS] if len(tasks) > 1 else []),
        *([DIFFERENT_SCORING.format(", ".join(scoring))] if scoring else []),
        *([TIED] if len(ranks) > 1 and ranks[0] == ranks[1] else []),
    ]


def _differing(runs: Sequence[FoundRun]) -> list[str]:
    """Return the keys that differ and have an effect in some run, those of `FIRST_BLOCKS` first."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    differing = [
        key
        for key in keys
        if len({json.dumps(run.settings.get(key, ABSENT)) for run in runs}) > 1
        and not all(key in run.idle for run in runs)
    ]
    return sorted(differing, key=_place_of_block)


def _place_of_block(key: str) -> int:
    block = key.partition(".")[0]
    return FIRST_BLOCKS.index(block) if block in FIRST_BLOCKS else len(FIRST_BLOCKS)


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Shorten each key to its last two words, or to as many as tell it from the others."""
    names = {}
    for key in keys:
        words = key.split(".")
        for count in range(2, len(words)):
            name = ".".join(words[-count:])
            if sum(other == name or other.endswith(f".{name}") for other in keys) == 1:
                break
        else:
            name = key
        names[key] = name
    return names


def _measure(runs: Sequence[FoundRun], keys: Sequence[str], labels: Mapping[str, str]) -> Setting:
    values = runs[0].values_of(keys)
    name = ", ".join(f"{labels[key]}={value_text(value)}" for key, value in values.items())
    counted = _counted(runs)
    figures = {}
    for measure, of_run in _measures(counted).items():
        found = [figure for figure in map(of_run, counted) if figure is not None]
        if found and len(found) == len(counted):
            figures[measure] = _over_seeds(measure, found)
    return Setting(name=name or "all alike", values=values, runs=runs, figures=figures)


def _counted(runs: Sequence[FoundRun]) -> list[FoundRun]:
    return list({run.seed: run for run in runs if run.final}.values())


def value_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _measures(runs: Sequence[FoundRun]) -> dict[str, Callable[[FoundRun], Figure | None]]:
    passes = sorted({k for run in runs if run.final for k in run.final.pass_at})
    return {
        "success": lambda run: _of_tasks(run, lambda report: report.success),
        **{f"pass@{k}": partial(_pass_at, k=k) for k in passes},
        "reward": lambda run: _of_tasks(run, lambda report: report.reward),
        "turns": lambda run: _of_tasks(run, lambda report: report.turns),
        "train reward": _train_reward,
        TIME: lambda run: None if run.duration_s is None else _plain(run.duration_s / 60),
    }


def _of_tasks(run: FoundRun, of: Callable[[EvalReport], Interval | None]) -> Figure | None:
    interval = of(run.final) if run.final else None
    if interval is None:
        return None
    return Figure(mean=interval.mean, low=interval.low, high=interval.high, over="tasks")


def _pass_at(run: FoundRun, k: int) -> Figure | None:
    return _of_tasks(run, lambda report: report.pass_at.get(k))


def _train_reward(run: FoundRun) -> Figure | None:
    last = run.steps[-max(1, round(TRAIN_SHARE * len(run.steps))) :]
    reward = mean_of(last, "reward/mean")
    return None if reward is None else _plain(reward)


def _plain(value: float) -> Figure:
    return Figure(mean=value, low=None, high=None, over="tasks")


def _over_seeds(measure: str, figures: Sequence[Figure]) -> Figure:
    if len(figures) == 1:
        return figures[0]
    if measure == TIME:  # It depends on the machine.
        return _plain(fmean(figure.mean for figure in figures))
    bounds = FRACTIONS if measure == "success" or measure.startswith("pass@") else None
    interval = interval_over_runs([figure.mean for figure in figures], CONFIDENCE, bounds)
    assert interval is not None
    return Figure(mean=interval.mean, low=interval.low, high=interval.high, over="seeds")


def _rank(setting: Setting) -> tuple[bool, bool, float, float]:
    """Sort by success, then by reward; those that were scored on too few tasks come last."""
    success, reward = setting.figures.get("success"), setting.figures.get("reward")
    is_partial = not _is_representative(setting)
    means = -(success.mean if success else 0), -(reward.mean if reward else 0)
    return success is None, is_partial, *means


def _is_representative(setting: Setting) -> bool:
    return all(run.final.is_representative for run in setting.counted if run.final)


def _partly_scored(settings: Sequence[Setting]) -> list[str]:
    finals = [(run.id, run.final) for setting in settings for run in setting.counted if run.final]
    passes = [
        f"{name}: pass@{k}{found} of {final.num_tasks}"
        for name, final in finals
        for k in sorted(final.pass_at)
        if (found := final.pass_on(k))
    ]
    partly = [
        f"{name}: on {final.on_tasks}"
        + ("" if final.is_representative else ", too few for an interval or a comparison")
        for name, final in finals
        if final.num_scored_tasks < final.num_tasks
    ]
    return [*partly, *passes]


def _of_other_code(settings: Sequence[Setting]) -> list[str]:
    """Name the runs that were played or scored by other code than the first run of their row."""
    notes = []
    for setting in settings:
        first, *others = setting.counted or setting.runs
        for run in others:
            differences = find_other_facts(first.facts, run.facts)
            if changed := [str(each) for each in differences if each.kind == "code"]:
                notes.append(
                    f"{run.id} has the settings of {first.id} but other code, so their mean may "
                    f"mix two rewards: {'; '.join(changed)}"
                )
    return notes


def _without_end(runs: Sequence[FoundRun]) -> list[str]:
    """Name the runs that finished without a cause to stop early, and whose last steps are lost."""
    return [
        f"{run.id} has finished, and its metrics.jsonl ends at step {run.step} of {run.num_steps}: "
        "the file is damaged, and the run is compared as a shorter one"
        for run in runs
        if run.status == "finished"
        and not (run.cause or run.reproduces)
        and 0 < run.step < (run.num_steps or 0)
    ]


def _best_run(best: Setting) -> FoundRun:
    def worth(run: FoundRun) -> tuple[float, float]:
        assert run.final
        success, reward = run.final.success, run.final.reward
        return success.mean if success else -1.0, reward.mean if reward else -1.0

    return max(best.counted, key=worth)


def _may_equal(best: Setting, other: Setting) -> bool:
    """Return whether the best setting's lead in success may be chance.

    Two single runs are paired by task; otherwise the intervals over seeds must not overlap.
    """
    ours, theirs = best.figures.get("success"), other.figures.get("success")
    if ours is None or theirs is None:
        return False
    if not _is_representative(other):
        return True
    if len(best.counted) == len(other.counted) == 1:
        difference = _paired(best.counted[0], other.counted[0])
        return difference is None or not difference.excludes_zero
    return theirs.high is None or ours.low is None or theirs.high >= ours.low


def _paired(first: FoundRun, second: FoundRun) -> Interval | None:
    assert first.final and second.final
    theirs = {task.key: task.successes for task in second.final.tasks}
    return paired_difference(
        [theirs[task.key] for task in first.final.tasks],
        [task.successes for task in first.final.tasks],
        num_resamples=NUM_RESAMPLES,
        confidence=CONFIDENCE,
        seed=0,
        bounds=FRACTIONS,
    )
