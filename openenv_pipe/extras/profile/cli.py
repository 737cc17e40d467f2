"""The command `profile`: help and arguments. The work is in the modules beside it."""

from typing import Annotated

import typer

from openenv_pipe.cli.arguments import Overrides
from openenv_pipe.cli.control import command_line, controlled


def profile(
    overrides: Overrides,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps of GRPO to measure.")] = 3,
) -> None:
    """Show where the time of training steps goes, and which keys to change.

    The steps are those of `train`, without evaluations; the first is not measured.
    No run folder is kept. For a flame graph of all threads, run it under py-spy.

    \b
    openenv-pipe profile conf=wordle
    openenv-pipe profile conf=wordle trainer.warm_start.steps=5 --steps 5
    py-spy record --format speedscope -o qwen3.json -- openenv-pipe profile conf=wordle_qwen3
    """
    from openenv_pipe.config.compose import compose

    composed = compose(overrides)
    with controlled() as control:
        from openenv_pipe.cli.console import print_table
        from openenv_pipe.extras.profile.command import advice, as_table, summary
        from openenv_pipe.extras.profile.command import profile as profile_steps

        profiled = profile_steps(composed, steps, command_line(), control)
    print(summary(profiled))
    print_table(as_table(profiled))
    for text in advice(profiled):
        print(f"- {text}")
