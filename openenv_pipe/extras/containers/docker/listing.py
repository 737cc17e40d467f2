"""The table of containers that `openenv-pipe hosts` prints."""

from collections.abc import Sequence

from rich.text import Text

from openenv_pipe.extras.containers.docker.daemon import Owned
from openenv_pipe.system.tables import Column, Fit, Table

STYLES = {"running": "green", "orphan": "bold red"}


def containers_table(owned: Sequence[Owned]) -> Table:
    """Return a table with a line for each container. An orphan is one whose run has died."""
    table = Table(
        Column("container"),
        Column("state"),
        Column("run by", drop=1),
        Column("logs", drop=2, fit=Fit.FOLD),
    )
    for each in owned:
        state = each.container.status if each.owner.alive else "orphan"
        style = STYLES.get(state, "yellow")
        process = f"process {each.owner.pid} on {each.owner.host}"
        table.add_row(each.container.name, Text(state, style), process, each.logs)
    return table
