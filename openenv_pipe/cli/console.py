"""Consoles for tables and colours: untrusted text neither acts on the terminal nor is markup."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import (
    Console,
    ConsoleOptions,
    ConsoleRenderable,
    RenderableType,
    RenderHook,
    RenderResult,
)
from rich.segment import Segment

from openenv_pipe.cli.arguments import junit_suite
from openenv_pipe.cli.streams import is_live
from openenv_pipe.commands import findings
from openenv_pipe.commands.findings import write_junit
from openenv_pipe.system.secrets import redact
from openenv_pipe.system.untrusted_text import visible

FILE_WIDTH = 10_000  # columns where stdout is not a terminal


def open_console(**options: Any) -> Console:
    """Return a console whose styles come from `Text` and `style`; options are those of rich."""
    console = Console(markup=False, emoji=False, **options)
    console.push_render_hook(_CleaningHook())
    return console


@contextmanager
def announcing() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows on stderr what is done: in a line that changes, or in lines."""
    console = open_console(stderr=True)
    if is_live(sys.stderr):
        with console.status("") as status:
            yield status.update
    else:
        yield console.print


def print_table(shown: RenderableType) -> None:
    """Print a table to stdout.

    If stdout is not a terminal, a table has all its columns and lines are not broken, unless the
    environment variable COLUMNS sets a width.
    """
    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    width = None if has_width else FILE_WIDTH
    open_console(width=width, highlight=False).print(shown, crop=False)


def print_findings(
    lines: Sequence[findings.Line],
    form: Literal["table", "json"] = "table",
    junit: Path | None = None,
) -> None:
    """Print what a check found, and exit with code 1 if something failed.

    junit: where it is also written as JUnit XML.
    """
    if form == "json":
        print(findings.as_json(lines))
    else:
        print_table(findings.as_table(lines))
    if junit is not None:
        write_junit(junit, junit_suite(junit), lines)
    if findings.has_failed(lines):
        raise typer.Exit(1)


class _CleaningHook(RenderHook):
    """Lets everything that a console prints pass through `Cleaned`."""

    def process_renderables(
        self, renderables: Sequence[ConsoleRenderable]
    ) -> list[ConsoleRenderable]:
        return [Cleaned(each) for each in renderables]


class Cleaned:
    """Something to print, without secrets and control characters; styles and cursor moves stay."""

    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(redact(segment.text)), segment.style)
