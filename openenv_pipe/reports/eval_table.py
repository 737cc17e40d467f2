"""Evaluations for a terminal: tables of scores and of differences, sentences, and warnings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.config.schema import EvalConfig, RunConfig
from openenv_pipe.errors import UserError
from openenv_pipe.registry import if_command
from openenv_pipe.reports.unusable import MANY_UNUSABLE, unusable_text
from openenv_pipe.runs.eval_difference import ReportDifference, TaskChange, compare_reports
from openenv_pipe.runs.eval_report import EvalReport, in_order
from openenv_pipe.runs.evals import env_of
from openenv_pipe.system.intervals import Interval
from openenv_pipe.system.markdown import UNKNOWN
from openenv_pipe.system.resources import short_path
from openenv_pipe.system.tables import Column, Fit, Table
from openenv_pipe.system.untrusted_text import shortened

MAX_LABELS = 50  # lines of a table; the reports' files have all
MAX_CHANGED = 10  # tasks that are named
FEW_DISTINCT = 0.05  # share of an evaluation's episodes; a warning if no more are distinct


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A report, the name of what was evaluated, and the folder of its run."""

    name: str
    report: EvalReport
    folder: Path
    word: str = ""  # how the user has named what was evaluated; empty for others
    duration_s: float | None = None  # of the evaluation; None: an earlier command has made it
    objection: str | None = None  # why it is not of the model that the user has named


def eval_tables(rows: Sequence[Row], config: EvalConfig, seed: int) -> list[Table]:
    """Return the tables of scores, of success by label, and of differences to the first report.

    Reports of an environment of `beside` are compared with the first of that environment. Without
    labels, or other reports of the same tasks, some tables are missing.
    """
    columns = dict.fromkeys(column for row in rows for column in row.report.by_label)
    tables = [_scores(rows), *(_by_label(rows, column) for column in columns)]
    for first, compared in paired_with_first(rows, config, seed):
        changes = [change for _, change in compared if change]
        if changes:
            tables.append(_differences(first, compared, config))
        if any(change.fixed or change.regressed for change in changes):
            tables.append(_changed_tasks(first.name, compared))
    return tables


Compared = Sequence[tuple[Row, ReportDifference | None]]


def paired_with_first(
    rows: Sequence[Row], config: EvalConfig, seed: int
) -> Sequence[tuple[Row, Compared]]:
    """Return the first report of each environment, and how each of its others differs from it.

    The difference is None where the two have no task in common, another opponent or, as reports
    of one run, another scoring.
    """
    found = []
    for env in dict.fromkeys(env_of(row.report.label) for row in rows):
        first, *others = [row for row in rows if env_of(row.report.label) == env]
        compared = [(row, _difference(first, row, config, seed)) for row in others]
        found.append((first, compared))
    return found


def scores_text(report: EvalReport) -> str:
    """Return the means of a report, and over how many tasks they are, in one line."""
    parts = [
        f"{name} {interval:{form}}"
        for name, interval, form in (
            ("success", report.success, ".1%"),
            ("reward", report.reward, ".3f"),
            ("the environment's own reward", report.env_reward, ".3f"),
        )
        if interval is not None
    ]
    if report.success is not None and report.reward is None:
        why = "it compares the episodes of a group" if report.env_reward else "a term has no value"
        parts.insert(1, f"reward not measured ({why})")
    return f"{', '.join(parts) or 'nothing was scored'}, on {report.on_tasks}"


def changes_text(report: EvalReport) -> str:
    """Say what of the run's own settings and code it was not measured with; empty if nothing."""
    changed = "; ".join(f"{key} is {how}" for key, how in report.measured_with.items())
    own = "settings or code than the run's own"
    return f"measured with other {own}: {shortened(changed)}" if changed else ""


def intervals_text(reports: Mapping[str, EvalReport], config: RunConfig) -> str:
    """Return `95% intervals`, and which reports have intervals of another level.

    reports: by name. config: of their run.
    """
    environments, usual = config.environments, config.eval.confidence
    others: dict[float, list[str]] = {}
    for name, report in reports.items():
        own = environments.get(env_of(report.label), config).eval.confidence
        if (level := report.confidence or own) != usual:
            others.setdefault(level, []).append(name)
    texts = [f"{100 * level:g}% for {' and '.join(names)}" for level, names in others.items()]
    return f"{100 * usual:g}% intervals" + (f" ({'; '.join(texts)})" if texts else "")


def eval_warnings(report: EvalReport, folder: Path) -> list[str]:
    """Return what makes the scores of a report doubtful, with the command that shows examples.

    folder: of its run.
    """
    command = f"`openenv-pipe episodes {short_path(folder)} --eval {report.label}"
    warnings = []
    if changed := changes_text(report):
        warnings.append(changed)
    if report.error is None and report.num_tasks and not report.is_representative:
        warnings.append(
            f"only {report.num_scored_tasks} of {report.num_tasks} tasks were scored, too few for "
            "an interval, a comparison or a decision (eval.min_scored_share); most often the "
            "episodes failed" + if_command("episodes", f": {command} --status error` shows why")
        )
    if report.is_representative and report.left_out_ks:
        names, k = ", ".join(f"pass@{k}" for k in report.left_out_ks), report.left_out_ks[0]
        warnings.append(
            f"no {names}: only {report.num_tasks_at(k)} of {report.num_tasks} tasks have {k} "
            "scored samples (eval.min_scored_share)"
        )
    without = sum(len(task.successes) - len(task.rewards) for task in report.tasks)
    if without and (report.reward is not None or report.env_reward is None):
        others = "; the mean reward is that of the others" * (report.reward is not None)
        warnings.append(
            f"{without} of {report.num_scored_episodes} scored episodes have no reward, because a "
            "term has no value: no other sample of the task was scored, or the judge's budget was "
            f"spent (judge.when_spent=continue){others}"
        )
    if report.num_timed_out:
        shown = if_command("episodes", f": {command} --status error` names the tasks")
        warnings.append(
            f"{report.num_timed_out} of {report.num_failed} failed episodes had no answer of their "
            f"environment within env.reset_timeout_s or env.step_timeout_s{shown}"
        )
    if report.unusable is not None and report.unusable >= MANY_UNUSABLE:
        shown = if_command("episodes", f"; {command}` shows some")
        warnings.append(f"{unusable_text(report.unusable, 'replies')}{shown}")
    num_scored, num_distinct = report.num_scored_episodes, report.num_distinct
    if num_distinct and num_distinct <= FEW_DISTINCT * num_scored:
        warnings.append(
            f"only {num_distinct} of {num_scored} scored episodes are distinct in observations and "
            "replies, so the means are about these few; use tasks that differ (env.tasks.eval), or "
            "sample the replies (eval.temperature=1)"
        )
    if report.collapse is not None:
        warnings.append(
            f"{report.collapse}: the model answers all tasks alike, and a change of the success "
            "may only be a change to another reply; show it one example of each answer "
            "(env.adapter.examples), and look at the success by answer (env.tasks.eval.labels)"
        )
    return warnings


def _scores(rows: Sequence[Row]) -> Table:
    ks = sorted({k for row in rows for k in row.report.pass_at})
    has_env_reward = any(row.report.env_reward is not None for row in rows)
    has_opponent = any(row.report.opponent is not None for row in rows)
    table = Table(
        Column("eval"),
        Column("model", drop=5, fit=Fit.FOLD),
        *([Column("against", fit=Fit.FOLD)] if has_opponent else []),
        Column("success"),
        *(Column(f"pass@{k}", drop=3) for k in ks),
        Column("reward", drop=1),
        *([Column("env's reward", drop=1)] if has_env_reward else []),
        Column("turns", drop=4),
        Column("tasks scored"),
        Column("failed", drop=2),
    )
    for row in rows:
        report = row.report
        intervals = [report.reward, *([report.env_reward] if has_env_reward else []), report.turns]
        table.add_row(
            row.name,
            report.model,
            *([report.opponent or UNKNOWN] if has_opponent else []),
            _text(report.success),
            *(_text(report.pass_at.get(k)) + report.pass_on(k) for k in ks),
            *map(_text, intervals),
            f"{report.num_scored_tasks} of {report.num_tasks}",
            _failed(report),
        )
    return table


def _by_label(rows: Sequence[Row], column: str) -> Table:
    """Return the success of each evaluation on the tasks of each label."""
    scores = [row.report.by_label.get(column, {}) for row in rows]
    table = Table(
        Column(column),
        Column("tasks", drop=len(rows) + 1),
        *(Column(row.name, drop=number) for number, row in enumerate(rows)),
        title=f"\nSuccess by {column}",
    )
    labels = in_order({label for found in scores for label in found})
    for label in labels[:MAX_LABELS]:
        of_rows = [found.get(label) for found in scores]
        table.add_row(
            label,
            str(max(each.num_tasks for each in of_rows if each is not None)),
            *(_text(each.success if each else None) for each in of_rows),
        )
    if (more := len(labels) - MAX_LABELS) > 0:
        table.add_row(f"and {more} more", *[""] * (len(rows) + 1))
    return table


def _failed(report: EvalReport) -> str:
    if report.error is not None:
        return "not played"
    return f"{report.num_failed} of {sum(report.statuses.values())}"


def _differences(first: Row, compared: Compared, config: EvalConfig) -> Table:
    table = Table(
        Column(f"less {first.name}"),
        Column("tasks scored", drop=2),
        Column("success"),
        Column("reward", drop=1),
        Column("turns", drop=3),
        title=f"\nPaired by task, with {config.confidence:.0%} intervals; * excludes 0",
    )
    for row, change in compared:
        if change is None:
            why = "none in common"
            if row.report.opponent != first.report.opponent:
                why = "another opponent"
            elif _is_scored_otherwise(first, row):
                why = "another scoring"
            table.add_row(row.name, why, *[UNKNOWN] * 3)
        else:
            changes = (change.success, change.reward or change.env_reward, change.turns)
            tasks = f"{change.num_scored_tasks} of {change.num_tasks}"
            table.add_row(row.name, tasks, *map(_signed, changes))
    return table


def changed_tasks(change: ReportDifference) -> list[tuple[str, int, float, str]]:
    """Return kind, number, number by chance and some names of the fixed and regressed tasks."""
    return [
        ("fixed", len(change.fixed), change.fixed_by_chance, _names(change.fixed)),
        ("regressed", len(change.regressed), change.regressed_by_chance, _names(change.regressed)),
    ]


def _names(changes: Sequence[TaskChange]) -> str:
    names = ", ".join(each.task for each in changes[:MAX_CHANGED])
    more = len(changes) - MAX_CHANGED
    return f"{names} and {more} more" if more > 0 else names


def _changed_tasks(first: str, compared: Compared) -> Table:
    table = Table(
        Column(f"after {first}"),
        Column("success"),
        Column("tasks"),
        Column("at random", drop=1),
        Column("which", drop=2, fit=Fit.FOLD),
        title="\nTasks with another success, and how many there would be if their episodes were "
        "divided at random",
    )
    for row, change in compared:
        for kind, count, chance, names in changed_tasks(change) if change else ():
            if count:
                table.add_row(row.name, kind, str(count), f"{chance:.1f}", names)
    return table


def _difference(before: Row, after: Row, config: EvalConfig, seed: int) -> ReportDifference | None:
    if _is_scored_otherwise(before, after):
        return None
    try:
        return compare_reports(before.report, after.report, config, seed)
    except UserError:  # It was evaluated on other tasks, or against another opponent.
        return None


def _is_scored_otherwise(before: Row, after: Row) -> bool:
    """Return whether two reports of one run were scored differently; False for different runs."""
    is_other = before.report.other_scoring != after.report.other_scoring
    return before.folder == after.folder and is_other


def _text(interval: Interval | None) -> str:
    return UNKNOWN if interval is None else f"{interval:.3f}"


def _signed(interval: Interval | None) -> str:
    if interval is None:
        return UNKNOWN
    return f"{interval:+.3f}{'*' if interval.excludes_zero else ''}"
