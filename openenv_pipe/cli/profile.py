"""The command `profile`: help and arguments. The work is in commands/profile/."""

from pathlib import Path
from typing import Annotated

import typer

from openenv_pipe.cli.arguments import Overrides
from openenv_pipe.cli.control import command_line, controlled
from openenv_pipe.errors import ConfigError


def profile(
    overrides: Overrides,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps of GRPO to measure.")] = 3,
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="The flame graph, for speedscope.")
    ] = Path("profile.speedscope.json"),
) -> None:
    """Show where the time of training steps goes, and which keys to change.

    They are steps of `train`, without evaluations; the first is not measured.
    No run folder is kept. The file is a flame graph for speedscope.app.

    \b
    openenv-pipe profile conf=wordle
    openenv-pipe profile conf=wordle trainer.warm_start.steps=5 --steps 5
    openenv-pipe profile conf=wordle_qwen3 engine=vllm --output qwen3.speedscope.json
    """
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.absolute().parent}")
    from openenv_pipe.config.compose import compose

    composed = compose(overrides)
    with controlled() as control:
        from openenv_pipe.cli.console import print_table
        from openenv_pipe.commands import profile as profiling

        profiled = profiling.profile(composed, steps, command_line(), control)
    profiling.write_speedscope(profiled, output)
    print(profiling.summary(profiled))
    print_table(profiling.as_table(profiled))
    for text in profiling.advice(profiled):
        print(f"- {text}")
    print(f"flame graph: {output} (open it at https://www.speedscope.app)")
