"""Evaluation: the same tasks with the same seeds for every model, as a report.

The commands `eval RUN` and `eval conf=...` end here; `pipeline` calls `evaluate` for its stages.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from openenv_pipe.assembly import Parts, assembled
from openenv_pipe.config.compose import Composed, amend
from openenv_pipe.config.schema import RunConfig, ScriptedEngineConfig
from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.evals import read_reports, save_report
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.scoring import EvalReport, summarise
from openenv_pipe.statistics import Interval


async def evaluate(parts: Parts, label: str) -> EvalReport:
    """Plays `eval.num_tasks` tasks of the eval split, `eval.samples_per_task` times each."""
    config = parts.config
    tasks = [parts.tasks.eval[index] for index in range(config.eval.num_tasks)]
    groups = await parts.collect(
        tasks,
        group_size=config.eval.samples_per_task,
        temperature=config.eval.temperature,
        label="eval",
    )
    episodes = [episode for group in groups for episode in group.episodes]
    return summarise(label, episodes, config.eval, config.seed, model=describe_model(config))


def evaluate_run(path: Path, overrides: Sequence[str]) -> None:
    """Evaluates the last checkpoint of a run, and keeps the report in the run's folder."""
    folder = RunFolder.open(path)
    config = amend(folder.config, overrides)
    checkpoints = folder.checkpoints()
    if not checkpoints:
        raise RunFolderError(
            f"{folder.path} has no checkpoint yet; trainer.checkpoint_every says when one is "
            "written, and Ctrl-C writes one"
        )
    logs = folder.path / "logs" / "eval"
    try:
        logs.mkdir(exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"the evaluation cannot be kept in {folder.path}: {error}") from None
    label = "scripted" if config.engine.type == "scripted" else checkpoints[-1].name
    report = asyncio.run(_evaluate_alone(config, logs, label, checkpoints[-1]))
    save_report(folder.path, report)
    _show(read_reports(folder.path), folder.path)


def evaluate_config(composed: Composed, command: Sequence[str]) -> None:
    """Evaluates a model that no run has trained, in a run folder of its own."""
    config = composed.config
    folder = RunFolder.create(config, overrides=composed.overrides, command=command)
    label = "scripted" if isinstance(config.engine, ScriptedEngineConfig) else "start"
    try:
        report = asyncio.run(_evaluate_alone(config, folder.logs, label, None))
    except KeyboardInterrupt:
        folder.finish("interrupted", cause="interrupted")
        raise
    except BaseException as error:
        folder.finish("failed", cause=f"{type(error).__name__}: {error}")
        raise
    save_report(folder.path, report)
    folder.finish("finished")
    _show({label: report}, folder.path)


def describe_model(config: RunConfig) -> str:
    """The model in a few words, for reports."""
    if isinstance(config.engine, ScriptedEngineConfig):
        return config.engine.policy
    return config.model.type if config.model.type == "tiny" else config.model.path


async def _evaluate_alone(
    config: RunConfig, logs: Path, label: str, checkpoint: Path | None
) -> EvalReport:
    async with assembled(config, logs, checkpoint) as parts:
        return await evaluate(parts, label)


def _show(reports: dict[str, EvalReport], path: Path) -> None:
    console = Console()
    table = Table(Column("eval", no_wrap=True), "model", "success", "reward", "turns", "failed")
    for name, report in reports.items():
        intervals = [report.success, report.reward, report.turns]
        table.add_row(
            name,
            report.model,
            *("-" if interval is None else _as_text(interval) for interval in intervals),
            f"{report.num_failed} of {sum(report.statuses.values())}",
        )
    console.print(table)
    console.print(f"{path}/eval", highlight=False)


def _as_text(interval: Interval) -> str:
    return f"{interval.mean:.3f} ({interval.low:.2f}..{interval.high:.2f})"
