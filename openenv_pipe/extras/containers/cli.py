"""The command `prune`: help and arguments."""

from typing import Annotated

import typer


def prune(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only list what would be removed.")
    ] = False,
    namespace: Annotated[
        str | None, typer.Option(help="Also look for pods, in this namespace.", show_default=False)
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(help="The kubeconfig's context of the namespace.", show_default="current"),
    ] = None,
) -> None:
    """Remove what killed runs have left: containers, weights in shared memory, and pods.

    What belongs to a live run, or to a run of another machine, stays. Runs remove most of this
    themselves, however they end, and leftovers of earlier runs when they start.

    \b
    openenv-pipe prune --dry-run
    openenv-pipe prune --namespace training
    """
    from openenv_pipe.extras.containers.prune import prune

    prune(dry_run=dry_run, namespace=namespace, context=context, notify=print)
