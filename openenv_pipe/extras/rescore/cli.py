"""The command `rescore`: options and help."""

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from openenv_pipe.cli.arguments import Form, RunsDir, Trust, with_runs_dir
from openenv_pipe.cli.completion import complete_subject
from openenv_pipe.cli.progress import notify_user


def rescore(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN OVERRIDES",
            help="The run whose episodes are scored, and keys of reward and judge.",
            autocompletion=complete_subject,
        ),
    ],
    step: Annotated[
        int | None, typer.Option(min=1, help="Only the episodes of this step.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="A folder that does not exist; default: RUN_rescored, beside the run's folder.",
            show_default=False,
        ),
    ] = None,
    form: Form = "table",
    runs_dir: RunsDir = None,
    trust: Trust = False,
) -> None:
    """Score the recorded episodes of a run again, with any reward, and compare the two.

    The run's folder stays as it is: the episodes with their new rewards are written beside it.

    \b
    openenv-pipe rescore wordle/0007 reward=usable
    openenv-pipe rescore wordle/0007 reward.terms.win.weight=0.5 --step 40 --format json
    openenv-pipe rescore wordle/0007 reward=ruler judge=openai judge.model=gpt-5-mini
    """
    from openenv_pipe.cli.console import print_table
    from openenv_pipe.extras.rescore.rescore import rescore_run

    work = rescore_run(
        with_runs_dir(words, runs_dir), output, step=step, trust=trust, notify=notify_user
    )
    rescored = asyncio.run(work)
    means, agreement = rescored.changes.means, rescored.changes.agreement
    if form == "json":
        values = {name: {"run": before, "now": now} for name, before, now in means}
        found = {"output": str(rescored.output), "means": values, "agreement": agreement}
        print(json.dumps(found, indent=2))
        return
    from rich.table import Table

    table = Table("mean of", "in the run", "now", box=None, header_style="bold")
    for name, *both in means:
        table.add_row(name, *map(_shown, both))
    print_table(table)
    table = Table("agreement of the rewards", "", box=None, header_style="bold")
    for name, value in agreement.items():
        table.add_row(name.replace("_", " "), _shown(value))
    print_table(table)
    print(rescored.output)


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
