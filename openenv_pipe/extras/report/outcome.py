"""What training changed, as a report says it: evaluations before and after it."""

from collections.abc import Mapping

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import UserError
from openenv_pipe.extras.report.sections import Records, clients_rewards
from openenv_pipe.reports.eval_table import changed_tasks
from openenv_pipe.runs.eval_difference import compare_reports
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.evals import GREEDY, STAGES, is_outdated
from openenv_pipe.system.intervals import Interval
from openenv_pipe.system.markdown import percent_text
from openenv_pipe.system.untrusted_text import for_markdown

Reports = Mapping[str, EvalReport]
TITLES = dict(zip(STAGES, ("at the start", "after the warm start", "after GRPO"), strict=True))
SUPERVISED = "loss/supervised"


def outcome_text(config: RunConfig, reports: Reports, records: Records) -> str:
    """Say in a sentence or two what training changed. `reports` are those of the stages."""
    if not config.trainer.steps:
        return _supervised(records)
    if not config.agent.plays_on_demand:
        return clients_rewards(records)
    stages = [name for name in STAGES if name in reports]
    if len(stages) < 2:
        return "There is no result: that needs an evaluation before training and one after it."
    pairs = [(stages[0], stages[-1])]
    if len(stages) == len(STAGES):
        pairs.append(("warm_start", "trained"))  # the part that GRPO contributed
    return "\n\n".join(
        f"{TITLES[before].capitalize()} → {stage_title(after, reports[after], records)}: "
        + _change(config, reports[before], reports[after])
        for before, after in pairs
    )


def stage_title(name: str, report: EvalReport, records: Records) -> str:
    """Return the title of the evaluation of a stage; of another one, its file's name.

    Those of a run that was extended are told apart by their steps.
    """
    last = STAGES[-1]
    if report.label.startswith(last) and any(record.get("stage") == "grpo" for record in records):
        name = report.label  # the file of a later one of this label has a number
    label, _, env = name.partition(".")
    stage = label.removesuffix(GREEDY)
    if stage not in TITLES:
        return name
    title = TITLES[stage]
    if is_outdated(report, records):
        title = f"after the first {report.step} steps of GRPO"
    greedy = ", greedy" if stage != label else ""
    return f"{title}{greedy}{f' in {env}' if env else ''}"


def _supervised(records: Records) -> str:
    losses = [record[SUPERVISED] for record in records if record.get(SUPERVISED) is not None]
    if not losses:
        return ""
    if len(losses) == 1:
        return f"The supervised loss was {losses[0]:.3f} before the only step."
    return f"The supervised loss went from {losses[0]:.3f} to {losses[-1]:.3f}."


def _change(config: RunConfig, before: EvalReport, after: EvalReport) -> str:
    try:
        change = compare_reports(before, after, config.eval, config.seed)
    except UserError:  # A resume with other tasks of evaluation, or a damaged report.
        return "The two evaluations have no task in common: there is nothing to compare."
    if change.success is None:
        return "No task has a scored episode in both evaluations: there is nothing to compare."
    first, last = change.means["success"]
    texts = [
        f"**success rate {percent_text(first)} → {percent_text(last)}** "
        f"({_change_text(change.success, 100, 0, ' points')})"
    ]
    measured = {"success rate": change.success}
    for name, measure in (("reward", "reward"), ("environment's own reward", "env_reward")):
        of_all = (getattr(each, measure) for each in (before, after, change))
        if all(each is not None for each in of_all):
            first, last = change.means[measure]
            measured[name] = found = getattr(change, measure)
            texts.append(f"{name} {first:.3f} → {last:.3f} ({_change_text(found, 1, 3, '')})")
    samples = after.samples_per_task
    on = f"on {change.on_tasks}, {samples} sample{'s' * (samples != 1)} each"
    has_limits = any(found.low is not None for found in measured.values())
    confidence = f", with {config.eval.confidence:.0%} intervals" if has_limits else ""
    text = f"{' and '.join(texts)}{confidence}, {on}. {_verdict(measured)}".rstrip()
    tasks = [
        f"{kind.title()} tasks: {count}, {chance:.1f} if divided at random ({for_markdown(names)})."
        for kind, count, chance, names in changed_tasks(change)
        if count
    ]
    return " ".join([text, *tasks])


def _change_text(change: Interval, scale: float, digits: int, unit: str) -> str:
    mean = f"{scale * change.mean:+.{digits}f}{unit}"
    if change.low is None or change.high is None:
        return mean
    low, high = (f"{scale * each:+.{digits}f}" for each in (change.low, change.high))
    return f"{mean}, {low} to {high}"


def _verdict(changes: Mapping[str, Interval]) -> str:
    """Say which changes are not proved, because an interval includes 0 or does not exist."""
    if all(change.low is None for change in changes.values()):
        return "Too few tasks were scored in both for an interval: no proof of a change."
    proven = [name for name, change in changes.items() if change.excludes_zero]
    if len(proven) == len(changes):
        return ""
    if not proven:
        return "The intervals include 0: no proof of a change."
    others = " and ".join(name for name in changes if name not in proven)
    return f"Only the {' and '.join(proven)} has provably changed, not the {others}."
