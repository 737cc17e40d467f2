"""Options that several commands have."""

from typing import Annotated

import typer

Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run what the run's folder names, also if another user made it or it was changed.",
    ),
]
