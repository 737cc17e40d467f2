"""The commands about what runs leave: `export`."""

from pathlib import Path
from typing import Annotated

import typer

from openenv_pipe.config.completion import complete_run


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run folder, alone for its last checkpoint, or as RUN@STEP or RUN@best.",
            autocompletion=complete_run,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="The folder to make.  [default: RUN/export/NAME]"),
    ] = None,
) -> None:
    """Export a trained model: one Hugging Face folder, adapters merged, with a model card.

    \b
    openenv-pipe export runs/wordle/latest
    openenv-pipe export runs/wordle/0007@best --output models/wordle
    """
    from openenv_pipe.export import export_run

    print(export_run(run, output))
