"""The commands for results of runs: `runs`, `tag` and `eval`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from openenv_pipe.cli.arguments import (
    FailIfWorse,
    FailUnder,
    Junit,
    RunsDir,
    Trust,
    junit_suite,
    with_runs_dir,
)
from openenv_pipe.cli.completion import complete_run, complete_subject
from openenv_pipe.cli.control import command_line
from openenv_pipe.cli.progress import notify_user
from openenv_pipe.system.process_settings import collect_as_usual
from openenv_pipe.system.progress import LineProgress

if TYPE_CHECKING:
    from openenv_pipe.commands.findings import Line

BELOW_THRESHOLD = 3  # the exit code of results that miss their --fail-under


def runs(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="The same as --runs-dir DIR.")
    ] = None,
    with_tag: Annotated[
        str | None, typer.Option("--tag", help="List only the runs with this tag.")
    ] = None,
    runs_dir: RunsDir = None,
) -> None:
    """List the runs, with their status, results and tags.

    The reward is the mean over the last step's training episodes; `eval` precedes the reward of an
    evaluated model that no run has trained. Long failure causes are cut off; report.md has all.

    \b
    openenv-pipe runs
    openenv-pipe runs --tag baseline
    """
    from openenv_pipe.cli.console import print_table
    from openenv_pipe.reports.runs_table import list_runs, runs_table
    from openenv_pipe.runs.places import existing_folders

    rows = list_runs(existing_folders(folder or runs_dir))
    print_table(runs_table([row for row in rows if with_tag is None or with_tag in row.tags]))


def tag(
    run: Annotated[str, typer.Argument(metavar="RUN", autocompletion=complete_run)],
    tags: Annotated[
        list[str] | None, typer.Argument(metavar="[TAG]...", help="Tags to add.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="A tag to remove; may be repeated.")
    ] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Add or remove tags of a run, by which `runs --tag` and `view` find it, and print its tags.

    \b
    openenv-pipe tag runs/wordle/0007 baseline
    openenv-pipe tag runs/wordle/0007 --remove baseline
    """
    from openenv_pipe.runs.find import find_run
    from openenv_pipe.runs.tags import change_tags, read_tags

    folder = find_run(run, runs_dir).path
    changes = {"add": tags or [], "remove": remove or []}
    found = change_tags(folder, **changes) if any(changes.values()) else read_tags(folder)
    print("\n".join(found))


def evaluate(
    subjects: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... OVERRIDES",
            help="Run folders, each alone or as RUN@STEP, RUN@best, RUN@start; or conf=NAME for a "
            "model that no run has trained. Overrides change what is evaluated.",
            autocompletion=complete_subject,
        ),
    ],
    fail_under: FailUnder = None,
    fail_if_worse: FailIfWorse = None,
    junit: Junit = None,
    runs_dir: RunsDir = None,
    trust: Trust = False,
) -> None:
    """Evaluate one or more runs on the same tasks, or an untrained model.

    \b
    openenv-pipe eval runs/wordle/latest
    openenv-pipe eval runs/wordle/0001@start runs/wordle/0001 runs/wordle/0002
    openenv-pipe eval runs/wordle/latest eval.temperature=1 eval.greedy=true
    openenv-pipe eval conf=wordle engine=scripted engine.policy=wordle.policies:consistent
    openenv-pipe eval runs/wordle/latest --fail-under success=0.8
    openenv-pipe eval runs/wordle/0001 runs/wordle/latest --fail-if-worse success=0.05
    """
    from openenv_pipe.commands import thresholds

    least = thresholds.parse_thresholds(fail_under or [])
    margins = thresholds.parse_margins(
        fail_if_worse or [], sum("=" not in word for word in subjects)
    )
    thresholds.reject_empty_junit(junit, [*least, *margins])
    progress = LineProgress(notify_user)
    with progress.phase("loading the libraries"):
        from openenv_pipe.cli.console import print_table
        from openenv_pipe.commands.evaluate import evaluate as evaluate_words
        from openenv_pipe.pipeline import RunControl
        from openenv_pipe.reports.eval_table import eval_tables, eval_warnings
        from openenv_pipe.runs.evals import BASELINE

    collect_as_usual()
    words = with_runs_dir(subjects, runs_dir)
    result = evaluate_words(words, command_line(), RunControl(progress=progress), trust=trust)
    rows = result.shown
    if least or margins:  # Baselines are not judged.
        rows = [row for row in rows if not row.report.label.startswith(BASELINE)]
    for table in eval_tables(rows, result.config.eval, result.config.seed):
        print_table(table)
    for row in result.played:
        for warning in eval_warnings(row.report, row.folder):
            notify_user(f"{row.name}: {warning}")
    for folder in result.folders:
        print(f"{folder}/eval")
    measured = thresholds.measured_of(result.own, result.config.eval.min_scored_share)
    lines = thresholds.compare_with_thresholds(measured, least)
    lines += thresholds.compare_with_first(
        result.own, margins, result.config.eval, result.config.seed
    )
    end_if_below(lines, junit)


def end_if_below(lines: "Sequence[Line]", junit: Path | None, *, to_stderr: bool = False) -> None:
    """Print the lines, write the JUnit file if wanted, and end with `BELOW_THRESHOLD` if a line
    fails. to_stderr: stdout has data for programs."""
    from openenv_pipe.commands.findings import has_failed, verdict, write_junit

    for line in lines:
        print(verdict(line), file=sys.stderr if to_stderr else sys.stdout)
    if junit is not None:
        write_junit(junit, junit_suite(junit), lines)
    if has_failed(lines):
        raise typer.Exit(BELOW_THRESHOLD)
