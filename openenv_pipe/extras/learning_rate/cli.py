"""The command `lr`: help and arguments. The work is in the modules beside it."""

from typing import Annotated

import typer

from openenv_pipe.cli.arguments import Form, Overrides, RunsDir, with_runs_dir
from openenv_pipe.cli.control import command_line, controlled

NO_CHOICE = 1  # the exit code of a search that shows no rate to train with


def lr(
    overrides: Overrides,
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="The learning rates.  [default: five around that of the configuration]",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=2, help="Steps of GRPO at each.  [default: ten after the learning rate's warm-up]"
        ),
    ] = None,
    form: Form = "table",
    runs_dir: RunsDir = None,
) -> None:
    """Train for a few steps at several learning rates, and say which one to train with.

    The last line is the override that sets it. Exit code 1 if no rate can be recommended. After
    an interruption, the same command goes on. Its runs are those of the experiment NAME_lr.

    \b
    openenv-pipe lr conf=sums
    openenv-pipe lr conf=wordle model=qwen3_0_6b --rates 1e-5,3e-5,1e-4 --steps 20
    """
    from openenv_pipe.extras.learning_rate.request import read_request

    request = read_request(with_runs_dir(overrides, runs_dir), rates, steps)
    with controlled() as control:
        from openenv_pipe.cli.console import print_table
        from openenv_pipe.extras.learning_rate.choice import choose
        from openenv_pipe.extras.learning_rate.request import as_json, as_table, override_of
        from openenv_pipe.extras.learning_rate.trials import run_trials

        for text in (request.costs, *request.doubts):
            control.progress.note(text)
        trials = run_trials(request, command_line(), control)
    choice = choose(trials)
    if form == "json":
        print(as_json(trials, choice))
    else:
        print_table(as_table(trials))
        print(choice.why)
        if override := override_of(choice):
            print(override)
    if choice.lr is None:
        raise typer.Exit(NO_CHOICE)
