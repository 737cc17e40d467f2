"""report.md: a run on one page, also while it runs or after it died.

It contains what the files of the run folder say, and names what is missing. Each call writes it
anew, so notes belong elsewhere.
"""

from pathlib import Path
from urllib.parse import quote

from openenv_pipe.config.learning_rates import describe_lr
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.extras.report.costs import costs_text, seconds_text
from openenv_pipe.extras.report.outcome import Reports, outcome_text, stage_title
from openenv_pipe.extras.report.plots import draw_learning_curves, draw_losses
from openenv_pipe.extras.report.sections import (
    Records,
    baselines_text,
    clients_text,
    environment_rows,
    environments_table,
    model_rows,
    parts_tables,
    signal_text,
)
from openenv_pipe.reports.alarms import find_alarms
from openenv_pipe.reports.eval_table import eval_warnings, intervals_text
from openenv_pipe.reports.unscored import reason, unscored_text
from openenv_pipe.reports.unusable import unusable_warning
from openenv_pipe.runs.checkpoints import can_resume
from openenv_pipe.runs.differences import of_measures
from openenv_pipe.runs.episodes import episodes_path, iterate_episodes, last_episodes_path
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.evals import BASELINE, read_during, read_reports, read_stages
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics, stage_of
from openenv_pipe.runs.record import AttemptRecord, RunRecord
from openenv_pipe.runs.transcript import in_markdown
from openenv_pipe.system.files import write_text
from openenv_pipe.system.markdown import UNKNOWN, interval_text, table
from openenv_pipe.system.untrusted_text import code_block, code_span, for_markdown, shortened


def write_report(folder: RunFolder) -> Path:
    """Draw the plots and write report.md of a run in any state; return its path.

    Raises RunFolderError: A file of the run is damaged.
    """
    config = folder.written_config
    records = read_metrics(folder.metrics_path, budget=None)
    stages, reports = read_stages(folder.path), read_reports(folder.path)
    sections = [
        f"# {folder.record.id}",
        _state(folder, config, records),
        outcome_text(config, stages, records),
        _other_measures(folder.record),
        baselines_text(reports),
        _unusable(config, records),
        _alarms(config, records),
        _unscored(folder.path, records, reports),
        clients_text(records),
        _scores_table(folder.path, config, records, reports),
        _plots(folder.path, config, records, stages),
        environments_table(config, records),
        parts_tables(config, records),
        signal_text(records),
        _what_was_run(folder, config),
        costs_text(folder, config, records),
        _examples(folder.path, config),
        _further(folder, config),
    ]
    path = folder.path / "report.md"
    write_text(path, "\n\n".join(section for section in sections if section) + "\n")
    return path


def _state(folder: RunFolder, config: RunConfig, records: Records) -> str:
    trainer = config.trainer
    stage, num_steps = stage_of(trainer.steps, trainer.warm_start.steps)
    steps = [record["step"] for record in records if record.get("stage") == stage]
    kind = "GRPO" if stage == "grpo" else "supervised"
    done = f"{steps[-1] if steps else 0} of {num_steps} {kind} steps"
    lineage = folder.record.lineage
    if steps and steps[0] > 1 and lineage:
        done += f", the first {steps[0] - 1} of these by the run that it goes on from,"
    origin = f"{for_markdown(lineage.title)}: " if lineage else ""
    took = f"{origin}{done} in {seconds_text(folder.duration_s)}"
    if folder.status == "died":
        return f"**The run died** after {took}: its process is gone. Read `logs/latest/`."
    if folder.status == "running":
        return f"The run is **running**, {took} so far. This page is written anew when it ends."
    if folder.record.cause in (None, folder.status):  # `interrupted` says it all.
        is_whole = not steps or steps[-1] == num_steps or (lineage and lineage.kind != "fork")
        is_cut = folder.status == "finished" and not is_whole
        lost = " It did all steps, so the end of `metrics.jsonl` is lost." if is_cut else ""
        return f"The run is **{folder.status}**, {took}.{lost}"
    state = f"The run is **{folder.status}**, {took}."
    if folder.status == "finished":  # It has a cause if it ended before its last step.
        return f"{state} It {for_markdown(folder.record.cause)}"
    return f"{state} Cause:\n\n{code_block(shortened(folder.record.cause))}"


def _other_measures(record: RunRecord) -> str:
    """Warn of attempts since which other code, or other data, decides rewards."""
    return "\n\n".join(
        f"**Warning:** since attempt {attempt.number} (from "
        f"{attempt.checkpoint or 'the beginning'}) rewards may be computed differently, and cannot "
        f"be compared with those before it: {for_markdown('; '.join(changed))}."
        for attempt in record.attempts
        if (changed := of_measures(attempt.differences))
    )


def _unusable(config: RunConfig, records: Records) -> str:
    warning = unusable_warning(records, config.trainer.unusable_limit)
    return f"**Warning:** {warning}." if warning else ""


def _alarms(config: RunConfig, records: Records) -> str:
    alarms = find_alarms(records, config.trainer.max_mismatch)
    return "\n\n".join(f"**Alarm:** {alarm.what}. Try: {alarm.advice}." for alarm in alarms)


def _unscored(path: Path, records: Records, reports: Reports) -> str:
    text, file = unscored_text(records, reports), last_episodes_path(path)
    why = reason(each.episode for each in iterate_episodes(file)) if text and file else ""
    return f"{text} One of the reasons: {for_markdown(why)}" if why else text


def _scores_table(path: Path, config: RunConfig, records: Records, reports: Reports) -> str:
    if not reports:
        return ""
    ks = sorted({k for report in reports.values() for k in report.pass_at})
    has_env_reward = any(report.env_reward is not None for report in reports.values())
    rows = [
        [
            f"[{for_markdown(_title(name, report, records))}](eval/{quote(name)}.md)",
            interval_text(report.success, percent=True),
            *(interval_text(report.pass_at.get(k), percent=True) + report.pass_on(k) for k in ks),
            interval_text(report.reward),
            *([interval_text(report.env_reward)] if has_env_reward else []),
            interval_text(report.turns),
            f"{report.num_scored_tasks} of {report.num_tasks}",
            str(report.samples_per_task),
            UNKNOWN if report.temperature is None else f"{report.temperature:g}",
            _failures(report),
        ]
        for name, report in reports.items()
    ]
    passes = [f"pass@{k}" for k in ks]
    counts = ["tasks scored", "samples each", "temperature", "without success"]
    own = ["environment's own reward"] * has_env_reward
    titles = ["model", "success", *passes, "reward", *own, "turns", *counts]
    titled = {_title(name, report, records): report for name, report in reports.items()}
    caption = (
        f"Means over the scored tasks with {for_markdown(intervals_text(titled, config))}. Each "
        "row links to its tasks and its best and worst episodes. A failed episode (status error) "
        "or one without a reward counts in no mean."
    )
    if has_env_reward:
        relative = ", ".join(map(for_markdown, config.reward.relative))
        caption += (
            f" The reward compares the episodes of a group ({relative}), so single episodes have "
            "none."
        )
    warnings = [
        f"**Warning:** {for_markdown(_title(name, report, records))}: {warning}."
        for name, report in reports.items()
        for warning in eval_warnings(report, path)
    ]
    return "\n\n".join([table(titles, rows), caption, *warnings])


def _title(name: str, report: EvalReport, records: Records) -> str:
    """Return a row's title: of a stage, of a scripted policy, or the file's name."""
    if name.startswith(BASELINE):
        return f"baseline: {name.removeprefix(BASELINE)}"
    return stage_title(name, report, records)


def _failures(report: EvalReport) -> str:
    if report.error is not None:
        return "not played: it failed"
    return ", ".join(f"{n} {status}" for status, n in report.unsuccessful.items()) or "none"


def _plots(path: Path, config: RunConfig, records: Records, reports: Reports) -> str:
    plots = path / "plots"
    texts = []
    steps = config.trainer.steps
    points = [*reports.values(), *read_during(path)]
    if draw_learning_curves(plots / "learning_curves.png", records, points, steps):
        texts.append("![learning curves](plots/learning_curves.png)")
    if draw_losses(plots / "losses.png", records):
        texts.append("Entropy, gradient norm, mismatch and the like: [losses](plots/losses.png).")
    return "\n\n".join(texts)


def _what_was_run(folder: RunFolder, config: RunConfig) -> str:
    trainer, warm = config.trainer, config.trainer.warm_start
    record = folder.record
    terms = ", ".join(
        f"{term.weight:g} × {for_markdown(name)}" for name, term in config.reward.terms.items()
    )
    grpo = (
        f"{trainer.steps} steps of {trainer.tasks_per_step} tasks × {trainer.group_size} episodes, "
        f"{trainer.loss.title} loss by {trainer.loss.normalise}, "
        f"temperature {trainer.temperature:g}, kl {trainer.loss.kl.coef:g}"
    )
    warm_start = (
        f"{warm.steps} steps on {for_markdown(warm.source.title)}" if warm.steps else "none"
    )
    gpus = f", {', '.join(record.machine.gpus)}" if record.machine.gpus else ""
    rows = {
        **environment_rows(config),
        **model_rows(config, record.facts),
        **({"reward": terms} if trainer.steps else {}),
        "warm start": warm_start,
        "GRPO": grpo if trainer.steps else "none",
        "learning rates": describe_lr(config, folder.overrides),
        "engine, seed": f"{config.engine.type}, {config.seed}",
        "code": _code(folder),
        "machine": f"{for_markdown(record.machine.cpu)}, {record.machine.num_cpus} CPUs{gpus}",
        "command": code_span(" ".join(record.command)),
        **_history(record),
    }
    return "## What was run\n\n" + table(["", ""], [list(row) for row in rows.items()])


def _history(record: RunRecord) -> dict[str, str]:
    """Describe the run that this one was made from, and its attempts if there were several."""
    rows: dict[str, str] = {}
    if (lineage := record.lineage) is not None:
        at = f" at {lineage.checkpoint}" if lineage.checkpoint else ""
        changes = ", ".join(
            code_span(f"{key}={values[1]}") for key, values in lineage.changed.items()
        )
        rows[lineage.kind] = f"of {lineage.run}{at}{f', with {changes}' if changes else ''}"
    if len(record.attempts) > 1:
        rows["attempts"] = ", ".join(map(_attempt, record.attempts))
    return rows


def _attempt(attempt: AttemptRecord) -> str:
    """Say where an attempt began, how it ended, and which keys it changed."""
    begin = f"from {attempt.checkpoint or 'the beginning'}"
    keys = (code_span(f"{key}={values[1]}") for key, values in attempt.changed.items())
    return f"{attempt.status} ({', '.join([begin, *keys])})"


def _code(folder: RunFolder) -> str:
    """Name the program's version, and the checkouts of its code and of the working directory."""
    checkouts = [
        f"{code_span(Path(checkout.folder).name)} at "
        f"{checkout.sha[:10] if checkout.sha else 'no commit'}"
        f"{' with changes' if checkout.dirty else ''}"
        for checkout in folder.record.checkouts
    ]
    return ", ".join([f"openenv-pipe {folder.record.version}", *checkouts])


def _examples(path: Path, config: RunConfig) -> str:
    """Show the best and the worst episode of the last step, or one if all rewards are equal.

    Before the first step of GRPO, these are the episodes that the warm start imitates.
    """
    file = last_episodes_path(path)
    if file is None:
        return ""
    best = worst = None
    for episode in (each.episode for each in iterate_episodes(file) if each.episode.is_scored):
        worst = episode if worst is None or episode.reward < worst.reward else worst
        best = episode if best is None or episode.reward >= best.reward else best
    if best is None or worst is None:
        return ""
    shown = {"Best": best, "Worst": worst}
    if worst.reward == best.reward:
        shown = {"One of many alike": worst}
    title, source = "Episodes of the last step", config.trainer.warm_start.source
    if file == episodes_path(path, 0):
        title = "Episodes that the warm start imitates"
        if policy := source.scripted_policy:
            title += f", written by {policy}"
    texts = [f"## {title}\n\nFrom `episodes/{file.name}`."]
    for title, episode in shown.items():
        texts.append(f"**{title}**: {in_markdown(episode, '.')}")
    return "\n\n".join(texts)


def _further(folder: RunFolder, config: RunConfig) -> str:
    path, commands = folder.path, {}
    if can_resume(path, folder.record, folder.status):
        commands[f"openenv-pipe train --resume {path}"] = "go on where it stopped"
    if config.agent.plays_on_demand:
        commands[f"openenv-pipe eval {path}"] = "evaluate its model again"
    else:
        commands[f"openenv-pipe serve {path}"] = "its model, for evaluations of your own"
        commands[f"openenv-pipe serve {path}@start"] = "the one that it began with"
    commands[f"ls {path}/logs/latest {path}/checkpoints"] = "logs of the last attempt, weights"
    if episodes := last_episodes_path(path):
        commands[f"zcat {episodes} | head -n 1"] = "an episode with all its tokens"
    lines = [f"{command}    # {what}" for command, what in commands.items()]
    return "\n".join(["## To look further", "", "```bash", *lines, "```"])
