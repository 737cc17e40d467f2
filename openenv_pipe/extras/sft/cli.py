"""The command `sft`: help and arguments."""

from typing import Annotated

import typer

from openenv_pipe.cli.arguments import Overrides, RunsDir, with_runs_dir
from openenv_pipe.cli.control import command_line, controlled


def sft(
    data: Annotated[
        str,
        typer.Argument(
            help="Conversations: a file of JSON lines, or the id of a data set on the hub."
        ),
    ],
    overrides: Overrides,
    passes: Annotated[int, typer.Option(min=1, help="How often each conversation is used.")] = 1,
    runs_dir: RunsDir = None,
) -> None:
    """Train on conversations alone: supervised steps on what the assistant says in them.

    With conf=NAME, the agent is evaluated before and after in that experiment's environment.

    \b
    openenv-pipe sft conversations.jsonl --passes 2 model=qwen3_0_6b
    openenv-pipe sft conversations.jsonl conf=email_search trainer.warm_start.optimizer.lr=1e-5
    """
    from openenv_pipe.extras.sft.command import compose_sft

    composed = compose_sft(data, with_runs_dir(overrides, runs_dir), passes)
    with controlled() as control:
        from openenv_pipe import pipeline

        pipeline.train(composed, command_line(), control)
