"""The Markdown page of an evaluation: statuses, tasks, the best and the worst episodes."""

from collections.abc import Sequence
from statistics import fmean

from openenv_pipe.runs.eval_report import EvalReport, TaskScores, in_order
from openenv_pipe.runs.transcript import in_markdown
from openenv_pipe.system.markdown import UNKNOWN, interval_text, table
from openenv_pipe.system.untrusted_text import code_block, for_markdown, shortened
from openenv_pipe.types import Episode, Group

NUM_SHOWN = 3  # best and worst episodes each
MAX_TABLE_ROWS = 500  # tasks, or labels; the JSON file has all


def eval_page(name: str, report: EvalReport, groups: Sequence[Group]) -> str:
    """Return the whole page. `name` is the name of its files without suffix."""
    title = f"# {for_markdown(f'{report.label}: {report.model}')}"
    if report.error is not None:
        return f"{title}\n\n{code_block(shortened(report.error))}\n"
    sections = [
        title,
        _figures(report),
        _ends(report),
        _labels(name, report),
        _episodes(groups),
        _tasks(name, report),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _figures(report: EvalReport) -> str:
    rows = [["success", interval_text(report.success, percent=True)]]
    rows += [
        [f"pass@{k}", interval_text(found, percent=True) + report.pass_on(k)]
        for k, found in sorted(report.pass_at.items())
    ]
    rows.append(["reward", interval_text(report.reward)])
    if report.env_reward is not None:
        rows.append(["the environment's own reward", interval_text(report.env_reward)])
    rows.append(["turns", interval_text(report.turns)])
    how = "a scripted policy" if report.temperature is None else _sampling(report)
    text = f"{report.on_tasks}, {report.samples_per_task} episodes each, {how}."
    if report.unusable:
        text += f" {report.unusable:.0%} of the replies could not be turned into an action."
    if report.collapse is not None:
        text += f" {report.collapse}."
    if report.num_unscored:
        text += f" {report.num_unscored} episodes have no reward, and count in no mean."
    interval = f"{100 * report.confidence:g}% interval" if report.confidence else "interval"
    return f"{text}\n\n{table(['', f'mean over tasks [{interval}]'], rows)}"


def _sampling(report: EvalReport) -> str:
    how = f"sampled at temperature {report.temperature:g}" if report.temperature else "greedy"
    return ", ".join([how, *(f"{name} {value:g}" for name, value in report.sampling.items())])


def _ends(report: EvalReport) -> str:
    rows = [
        [status, str(number), str(report.unsuccessful.get(status, 0))]
        for status, number in report.statuses.items()
    ]
    return "## How the episodes ended\n\n" + table(["status", "episodes", "without success"], rows)


def _labels(name: str, report: EvalReport) -> str:
    """Return a table for each column of labels."""
    texts = []
    for column, found in report.by_label.items():
        rows = [
            [
                for_markdown(label),
                interval_text(found[label].success, percent=True),
                interval_text(found[label].reward),
                f"{found[label].num_scored_tasks} of {found[label].num_tasks}",
            ]
            for label in in_order(found)[:MAX_TABLE_ROWS]
        ]
        titles = [for_markdown(column), "success", "reward", "tasks scored"]
        texts.append(f"## By {titles[0]}\n\n{table(titles, rows)}")
        texts.append(_more(name, len(found) - len(rows)))
    return "\n\n".join(filter(None, texts))


def _more(name: str, num_left_out: int) -> str:
    return f"And {num_left_out} more, in `{name}.json`." if num_left_out else ""


def _episodes(groups: Sequence[Group]) -> str:
    """Show the worst and the best scored episodes, and the failed ones."""
    everyone = [episode for group in groups for episode in group.episodes]
    scored = sorted((each for each in everyone if each.is_scored), key=_worth)
    num_worst = min(NUM_SHOWN, -(-len(scored) // 2))
    shown = {
        "Failed": [each for each in everyone if each.failed][:NUM_SHOWN],
        "Worst": scored[:num_worst],
        "Best": scored[num_worst:][-NUM_SHOWN:][::-1],
    }
    texts = [
        f"## {title}\n\n" + "\n\n".join(in_markdown(each, "..") for each in episodes)
        for title, episodes in shown.items()
        if episodes
    ]
    return "\n\n".join(texts)


def _worth(episode: Episode) -> tuple[bool, float, int]:
    return episode.success, episode.reward, -len(episode.turns)


def _tasks(name: str, report: EvalReport) -> str:
    """List the tasks, the hardest first."""
    tasks = sorted(report.tasks, key=lambda task: (_mean(task.successes), _mean(task.rewards)))
    titles = ["task", "seed", "success", "reward", "turns", "ended", "failed"]
    rows = [_task_row(task) for task in tasks[:MAX_TABLE_ROWS]]
    text = f"## Tasks, the hardest first\n\n{table(titles, rows)}"
    return f"{text}\n\n{_more(name, len(tasks) - len(rows))}".rstrip()


def _task_row(task: TaskScores) -> list[str]:
    return [
        for_markdown(task.task),
        str(task.task_seed),
        f"{sum(task.successes)} of {len(task.successes)}",
        f"{fmean(task.rewards):.3f}" if task.rewards else UNKNOWN,
        f"{fmean(task.turns):.1f}" if task.turns else UNKNOWN,
        ", ".join(dict.fromkeys(task.statuses)) or UNKNOWN,
        str(task.num_failed),
    ]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else -1.0
