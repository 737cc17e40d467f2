"""Tables for terminals. On a narrow terminal columns are left out; a number is never cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

GAP = 2  # columns of the terminal between two columns of a table
MIN_TEXT = 16  # columns of the terminal, for a text that may be folded or cut


class Fit(StrEnum):
    """What happens to the cells of a column on a narrow terminal."""

    WHOLE = "whole"  # they stay in one line, as numbers and names have to
    FOLD = "fold"  # they go on in further lines
    CUT = "cut"  # they end in an ellipsis


@dataclass(frozen=True, slots=True)
class Column:
    """A column's title, and how it gives way.

    drop: the column with the highest number is left out first; one with 0 never is.
    """

    title: str
    drop: int = 0
    fit: Fit = Fit.WHOLE
    justify: Literal["left", "right"] = "left"
    style: str = ""


class Table:
    """A table without lines, for a console of rich."""

    def __init__(self, *columns: Column, title: str | None = None) -> None:
        self.title = title
        self.columns = columns
        self.rows: list[Sequence[str | Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Show the columns that fit, and name those that do not."""
        wanted = [self._wanted_width(index) for index in range(len(self.columns))]
        kept = self._kept(wanted, options.max_width)
        widths = self._widths(wanted, kept, options.max_width)
        shown = RichTable(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
        for index, width in widths.items():
            column = self.columns[index]
            shown.add_column(
                Text(column.title),
                justify=column.justify,
                style=column.style,
                width=width,
                no_wrap=column.fit is not Fit.FOLD,
                overflow="ellipsis" if column.fit is Fit.CUT else "fold",
            )
        for row in self.rows:
            shown.add_row(*(row[index] for index in kept))
        if self.title is not None:
            yield Text(self.title)
        whole = sum(widths.values()) + GAP * len(widths)  # may be more than the terminal has
        yield from console.render(shown, options.update(width=whole))
        hidden = [column.title for i, column in enumerate(self.columns) if i not in kept]
        if hidden:
            yield Text(f"left out at this width: {', '.join(filter(None, hidden))}", "dim")

    def _wanted_width(self, index: int) -> int:
        """Return the width of a column's longest line."""
        cells = [Text(self.columns[index].title), *(_text(row[index]) for row in self.rows)]
        return max(cell_len(line) for cell in cells for line in cell.plain.split("\n"))

    def _least_width(self, index: int, wanted: int) -> int:
        """Return the width below which a column is left out."""
        return wanted if self.columns[index].fit is Fit.WHOLE else min(wanted, MIN_TEXT)

    def _kept(self, wanted: Sequence[int], available: int) -> list[int]:
        """Return the indices of the columns that fit into the available width."""
        kept = list(range(len(self.columns)))
        while (
            sum(self._least_width(i, wanted[i]) for i in kept) + GAP * (len(kept) - 1) > available
        ):
            last = max(kept, key=lambda i: (self.columns[i].drop, i))
            if not self.columns[last].drop:
                break
            kept.remove(last)
        return kept

    def _widths(self, wanted: Sequence[int], kept: Sequence[int], available: int) -> dict[int, int]:
        """Return the width of each kept column; texts share what names and numbers leave."""
        widths = {i: self._least_width(i, wanted[i]) for i in kept}
        texts = sorted((i for i in kept if widths[i] < wanted[i]), key=lambda i: wanted[i])
        for position, index in enumerate(texts):
            left = available - sum(widths.values()) - GAP * (len(kept) - 1)
            share = max(left, 0) // (len(texts) - position)
            widths[index] = min(wanted[index], widths[index] + share)
        return widths


def _text(cell: str | Text) -> Text:
    return Text(cell) if isinstance(cell, str) else cell
