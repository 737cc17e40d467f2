"""The command `models`."""

import asyncio
from typing import Annotated

import typer

from openenv_pipe.cli.progress import notify_user


def models(
    fetch: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Get this model: a name of the list, an id on the hub, or a GGUF file to convert.",
        ),
    ] = None,
) -> None:
    """List the models that `model=` names and where they are on this machine, or get one.

    \b
    openenv-pipe models
    openenv-pipe models --fetch smollm2_135m
    """
    from openenv_pipe.cli.console import print_table
    from openenv_pipe.extras.models.command import fetch_model, models_table

    if fetch is None:
        print_table(models_table())
    else:
        print(asyncio.run(fetch_model(fetch, notify_user)) or f"{fetch} is built from a seed")
