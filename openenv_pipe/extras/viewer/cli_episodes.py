"""The commands `episodes` and `watch`."""

import sys
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from openenv_pipe.cli.arguments import RunsDir
from openenv_pipe.cli.completion import complete_run
from openenv_pipe.cli.progress import notify_user
from openenv_pipe.cli.streams import is_live, is_read
from openenv_pipe.errors import RunFolderError

if TYPE_CHECKING:
    from openenv_pipe.extras.viewer.episodes.query import EpisodeFilter

DEFAULT = "show"


class _ShowsByDefault(TyperGroup):
    """`episodes RUN` is `episodes show RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ShowsByDefault,
    no_args_is_help=True,
    help="Show recorded episodes, chosen by step, task, status, reward or text.\n\n\b\n"
    "openenv-pipe episodes latest --worst 3\n"
    "openenv-pipe episodes latest --eval trained --no-success\n"
    "openenv-pipe episodes export latest --format trl\n",
)

Run = Annotated[
    str, typer.Argument(help="A run's folder, its id, or latest.", autocompletion=complete_run)
]
Step = Annotated[int | None, typer.Option(min=0, help="Of this step; 0: demonstrations.")]
Evaluation = Annotated[
    str | None, typer.Option("--eval", metavar="LABEL", help="Of an evaluation, such as trained.")
]
Task = Annotated[str | None, typer.Option(help="Of tasks whose id contains this.")]
Status = Annotated[str | None, typer.Option(help="That ended like this: done, turn_limit, ...")]
Success = Annotated[
    bool | None, typer.Option("--success/--no-success", help="With or without success.")
]
MinReward = Annotated[float | None, typer.Option(help="With this reward at least.")]
MaxReward = Annotated[float | None, typer.Option(help="With this reward at most.")]
Term = Annotated[
    str | None, typer.Option(help="The reward term that --min-reward and --max-reward mean.")
]
Text = Annotated[str | None, typer.Option(help="In which these words occur in a row.")]
Worst = Annotated[int | None, typer.Option(min=1, help="The N with the lowest rewards.")]
Best = Annotated[int | None, typer.Option(min=1, help="The N with the highest rewards.")]


@app.command(DEFAULT)
def show(
    context: typer.Context,
    run: Run,
    step: Step = None,
    evaluation: Evaluation = None,
    task: Task = None,
    status: Status = None,
    success: Success = None,
    min_reward: MinReward = None,
    max_reward: MaxReward = None,
    term: Term = None,
    text: Text = None,
    worst: Worst = None,
    best: Best = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, without --worst and --best.")] = 10,
    form: Annotated[
        Literal["text", "md", "json"],
        typer.Option("--format", help="Text, Markdown, or a line of JSON for each."),
    ] = "text",
    full: Annotated[
        bool, typer.Option("--full", help="The messages as the model was shown them, uncut.")
    ] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show recorded episodes: what the environment and the model wrote.

    \b
    openenv-pipe episodes latest --step 40 --worst 3 --full
    openenv-pipe episodes wordle/0007 --task train/17 --no-success
    openenv-pipe episodes wordle/0007 --eval trained --best 5 --format md
    """
    from openenv_pipe.extras.viewer.episodes.listing import (
        Selection,
        as_text,
        find_episodes,
        none_found,
    )
    from openenv_pipe.runs.find import find_run

    wanted = _wanted(context.params, is_scored=True if worst or best else None)
    selection = Selection(wanted=wanted, worst=worst, best=best, first=limit)
    folder = find_run(run, runs_dir)
    num_shown = 0
    for shown in as_text(find_episodes(folder, selection), form, is_whole=full):
        print(shown, flush=True)
        num_shown += 1
        if not is_read(sys.stdout):
            return
    if not num_shown:
        notify_user(none_found(folder, selection))


@app.command()
def export(
    context: typer.Context,
    run: Run,
    form: Annotated[
        Literal["parquet", "jsonl", "trl", "verifiers", "atif"],
        typer.Option("--format", help="What reads it; see docs/episodes.md."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="A file that does not exist; atif, verifiers: a folder.",
            show_default="in the run's folder exports/",
        ),
    ] = None,
    step: Step = None,
    evaluation: Evaluation = None,
    task: Task = None,
    status: Status = None,
    success: Success = None,
    min_reward: MinReward = None,
    max_reward: MaxReward = None,
    term: Term = None,
    text: Text = None,
    best: Best = None,
    runs_dir: RunsDir = None,
) -> None:
    """Write recorded episodes as a data set for other tools.

    \b
    openenv-pipe episodes export wordle/0007 --format trl --success -o wins.jsonl
    openenv-pipe episodes export wordle/0007 --format parquet
    """
    from openenv_pipe.extras.viewer.episodes.export import default_output, export_episodes
    from openenv_pipe.extras.viewer.episodes.listing import Selection, find_episodes, none_found
    from openenv_pipe.runs.find import find_run

    wanted = _wanted(context.params, is_scored=True)
    folder = find_run(run, runs_dir)
    output = output or default_output(folder, form)
    selection = Selection(wanted=wanted, best=best, first=None)
    found = find_episodes(folder, selection)
    first = next(found, None)
    if first is None:
        raise RunFolderError(none_found(folder, selection))
    count = export_episodes(folder, chain([first], found), form, output)
    notify_user(f"{count} rows")
    print(output)


def _wanted(options: Mapping[str, Any], *, is_scored: bool | None) -> "EpisodeFilter":
    from openenv_pipe.extras.viewer.episodes.query import TRAIN, EpisodeFilter

    evaluation = options["evaluation"]
    return EpisodeFilter(
        source=f"eval/{evaluation}" if evaluation else TRAIN,
        first_step=options["step"],
        last_step=options["step"],
        reward_term=options["term"],
        reward_from=options["min_reward"],
        reward_to=options["max_reward"],
        is_scored=is_scored,
        **{name: options[name] for name in ("task", "status", "success", "text")},
    )


def watch(
    run: Run = "latest",
    every_s: Annotated[
        float, typer.Option("--every", min=0.1, help="Seconds between updates.")
    ] = 1.0,
    runs_dir: RunsDir = None,
) -> None:
    """Follow a run by its folder, until it ends. Ctrl-C leaves the run alone.

    Reads only the folder, so it also follows a run of another machine that shares it. Where stdout
    is not a terminal, it prints a line for each step.

    \b
    openenv-pipe watch
    openenv-pipe watch wordle/0007
    """
    from openenv_pipe.extras.viewer.run_state import RunState
    from openenv_pipe.runs.find import find_run

    state = RunState(find_run(run, runs_dir).path)
    if is_live(sys.stdout):
        _watch_live(state, every_s)
        return
    while is_read(sys.stdout):
        for line in state.new_lines():
            notify_user(line, sys.stdout)
        if state.has_ended:
            return
        time.sleep(every_s)


def _watch_live(state: Any, every_s: float) -> None:
    """Draw the state again and again in place; what was drawn last stays."""
    from rich.live import Live
    from rich.text import Text

    from openenv_pipe.cli.console import open_console

    with Live(console=open_console(), auto_refresh=False) as live:
        while is_read(sys.stdout):
            live.update(Text("\n".join(state.image())), refresh=True)
            if state.has_ended:
                return
            time.sleep(every_s)
