"""Options that several commands have."""

from typing import Annotated

import typer

from openenv_pipe.cli.completion import complete_override

Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run what the run's folder names, also if another user made it or it was changed.",
    ),
]

Overrides = Annotated[
    list[str],
    typer.Argument(
        metavar="OVERRIDES",
        default_factory=list,
        help="conf=NAME, group=CHOICE and key=VALUE, as in: conf=wordle model=hub trainer.steps=10",
        autocompletion=complete_override,
        show_default=False,
    ),
]
