"""The commands `view` and `compare`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from openenv_pipe.cli.arguments import FailUnder, Junit, RunsDir, Trust
from openenv_pipe.cli.completion import complete_run
from openenv_pipe.cli.progress import notify_user
from openenv_pipe.cli.results import end_if_below


def view(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|SWEEP|DIR]",
            help="A run, a sweep, or a folder of runs.  [default: the folder of runs]",
            autocompletion=complete_run,
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="[default: 8090, or the next that is free]")
    ] = None,
    host: Annotated[
        str, typer.Option(help="0.0.0.0 lets other machines in, with the link that is printed.")
    ] = "127.0.0.1",
    no_token: Annotated[
        bool,
        typer.Option(
            "--no-token",
            help="Let every user of this machine read these runs, and play them as you.",
        ),
    ] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(help="Write the pages into this new folder, to send or host them."),
    ] = None,
    runs_dir: RunsDir = None,
    trust: Trust = False,
) -> None:
    """Show live and finished runs in the browser: curves, episodes, tokens.

    Prints a link with an access token, and serves until Ctrl-C; with --bundle, writes static pages
    instead. The pages load nothing from other hosts.

    \b
    openenv-pipe view
    openenv-pipe view runs/wordle/latest --port 8091
    openenv-pipe view runs/wordle/0007 --bundle wordle_0007
    """
    from openenv_pipe.extras.viewer import view as viewing

    if bundle is not None:
        print(viewing.bundle(target, bundle, runs_dir=runs_dir, trust=trust))
        return

    viewing.view(
        target,
        runs_dir=runs_dir,
        host=host,
        port=port,
        needs_token=not no_token,
        trust=trust,
        notify=notify_user,
    )


def compare(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...|SWEEP",
            help="Runs, by folder or id, or the folder of a sweep.",
            autocompletion=complete_run,
        ),
    ],
    form: Annotated[
        Literal["table", "json", "csv", "md"],
        typer.Option("--format", help="What is printed: a table, or its data."),
    ] = "table",
    fail_under: FailUnder = None,
    junit: Junit = None,
    runs_dir: RunsDir = None,
) -> None:
    """Compare runs: the settings that differ, and the results.

    Runs that differ only in the seed share a row, with an interval over the seeds. `openenv-pipe
    view` shows the same with the learning curves.

    \b
    openenv-pipe compare wordle/0003 wordle/0004
    openenv-pipe compare runs/sweeps/2026-11-20_14-03-11 --format md
    openenv-pipe compare runs/sweeps/2026-11-20_14-03-11 --fail-under success=0.8
    """
    from openenv_pipe.cli.console import print_table
    from openenv_pipe.commands import thresholds
    from openenv_pipe.extras.viewer.compare.grouping import compare_settings
    from openenv_pipe.extras.viewer.compare.load import find_runs
    from openenv_pipe.extras.viewer.compare.text import as_table, as_text

    least = thresholds.parse_thresholds(fail_under or [])
    thresholds.reject_empty_junit(junit, fail_under or [])
    comparison = compare_settings(find_runs(targets, runs_dir))
    if form == "table":
        print_table(as_table(comparison))
    else:
        print(as_text(comparison, form), end="")
    lines = thresholds.compare_with_thresholds(comparison.measured, least)
    end_if_below(lines, junit, to_stderr=form != "table")
