"""The command `judge check`: help and arguments."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from openenv_pipe.cli.arguments import Form, RunsDir, Trust, with_runs_dir
from openenv_pipe.cli.completion import complete_subject
from openenv_pipe.cli.progress import notify_user

app = typer.Typer(
    no_args_is_help=True,
    help="Judges: measure how good a judge is.\n\n\b\n"
    "openenv-pipe judge check latest reward=ruler judge=openai judge.model=gpt-5-mini\n"
    "openenv-pipe judge check latest --min-auc 0.9\n",
)

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN OVERRIDES",
        help="The run whose episodes are judged, and keys of judge and reward. With conf=NAME "
        "judge and reward are that experiment's, and without RUN its newest run is taken.",
        autocompletion=complete_subject,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where the judge's answers are kept; default: RUN_judged, beside the run's folder.",
        show_default=False,
    ),
]


@app.command()
def check(
    words: Words,
    step: Annotated[
        int | None,
        typer.Option(min=1, help="Judge episodes of this step; default: evenly from all steps."),
    ] = None,
    groups: Annotated[int, typer.Option(min=1, help="Groups that are judged.")] = 32,
    orders: Annotated[
        int, typer.Option(min=1, help="Orders in which a group's episodes are shown.")
    ] = 2,
    repeats: Annotated[int, typer.Option(min=0, help="Repetitions of the first order.")] = 1,
    min_auc: Annotated[
        float, typer.Option(min=0, max=1, help="Lowest agreement with the reward.")
    ] = 0.7,
    min_self: Annotated[
        float, typer.Option(min=-1, max=1, help="Lowest rank correlation with itself.")
    ] = 0.7,
    max_position_bias: Annotated[
        float, typer.Option(min=0, help="Most that the place in the prompt may add to a score.")
    ] = 0.1,
    max_length_bias: Annotated[
        float, typer.Option(min=0, help="Highest rank correlation with the length.")
    ] = 0.3,
    max_failed: Annotated[
        float, typer.Option(min=0, max=1, help="Largest share without a verdict.")
    ] = 0.05,
    output: Output = None,
    form: Form = "table",
    runs_dir: RunsDir = None,
    trust: Trust = False,
) -> None:
    """Measure a judge on recorded episodes: its agreement with the reward and with itself, its
    position and length bias, and what it costs.

    Exit code 1 if a figure is outside its limit. Answers are cached, so a second check sends no
    requests.

    \b
    openenv-pipe judge check echo/0001
    openenv-pipe judge check wordle/0007 reward=ruler judge=openai judge.model=gpt-5-mini
    openenv-pipe judge check conf=echo reward=ruler judge=openai judge.model=gpt-5-mini --step 40
    openenv-pipe judge check latest --min-auc 0.9 --format json
    """
    from openenv_pipe.cli.console import print_findings
    from openenv_pipe.extras.judges.check import Limits, check_judge, find_recorded

    limits = Limits(
        min_auc=min_auc,
        min_self_correlation=min_self,
        max_position_bias=max_position_bias,
        max_length_bias=max_length_bias,
        max_failed_share=max_failed,
    )
    recorded = find_recorded(with_runs_dir(words, runs_dir), output, trust=trust)
    notify_user(f"episodes of {recorded.folder.path}; answers in {recorded.output}")
    work = check_judge(
        recorded, limits, step=step, num_groups=groups, num_orders=orders, num_repeats=repeats
    )
    print_findings(asyncio.run(work), form)
