"""The command `export`: options and help."""

from pathlib import Path
from typing import Annotated

import typer

from openenv_pipe.cli.arguments import Checkpoint, RunsDir, Trust
from openenv_pipe.cli.progress import notify_user


def export(
    run: Checkpoint,
    output: Annotated[
        Path | None, typer.Option(help="The folder to make.  [default: RUN/export/NAME]")
    ] = None,
    runs_dir: RunsDir = None,
    trust: Trust = False,
) -> None:
    """Export a trained model: one Hugging Face folder, adapters merged, with a model card.

    \b
    openenv-pipe export runs/wordle/latest
    openenv-pipe export runs/wordle/0007@best --output models/wordle
    """
    from openenv_pipe.extras.export.command import export_run

    print(export_run(run, output, runs_dir=runs_dir, trust=trust, notify=notify_user))
