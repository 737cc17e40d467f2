"""Options that several commands have."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from openenv_pipe.cli.completion import complete_override, complete_run
from openenv_pipe.config.overrides import override_with_text
from openenv_pipe.errors import UserError

# The --junit file that this command is to write, with the command's context; at most one.
junit_files: dict[Path, typer.Context] = {}


def reject_existing(context: typer.Context, path: Path | None) -> Path | None:
    """Return the path of --junit. Raises UserError if it exists."""
    if path is None:
        return None
    if path.is_dir():
        raise UserError(f"--junit {path} is a folder; name a file, such as {path / 'results.xml'}")
    if path.exists():
        raise UserError(f"--junit {path} exists and is not overwritten; remove it, or name another")
    junit_files[path] = context
    return path


def junit_suite(path: Path) -> str:
    """Return the name of the test suite of a --junit file: the command and its arguments.

    The arguments are the environments and runs, as in `env check my_env`. Overrides other than
    conf=NAME are left out, because they may have secrets.
    """
    if path not in junit_files:
        return path.stem
    context = junit_files[path]
    words = context.command_path.split()[1:]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.param_type_name == "argument" and value is not None:
            words += [value] if isinstance(value, str) else map(str, value)
    return " ".join(word for word in words if "=" not in word or word.startswith("conf="))


Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run the code that a run folder names, even if others made it or it was changed.",
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

RunsDir = Annotated[
    Path | None,
    typer.Option(
        "--runs-dir",
        metavar="DIR",
        help="The folder of runs.  [default: that of the variable OPENENV_PIPE_RUNS_DIR, or runs; "
        "and the folders of all runs started here]",
        show_default=False,
    ),
]

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run folder (its last checkpoint), or RUN@STEP, RUN@best, RUN@start.",
        autocompletion=complete_run,
    ),
]

Form = Annotated[
    Literal["table", "json"], typer.Option("--format", help="table, or json for programs")
]

FailUnder = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METRIC=VALUE",
        help="End with exit code 3 if the mean of success or reward is lower; may be repeated.",
    ),
]

FailIfWorse = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METRIC=VALUE",
        help="End with exit code 3 if a run is worse than the first by more than VALUE, and not by "
        "chance; may be repeated.",
    ),
]

Junit = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Also write the results as JUnit XML, for CI. The file must not exist.",
        callback=reject_existing,
        show_default=False,
    ),
]


def with_runs_dir(overrides: list[str], runs_dir: Path | None) -> list[str]:
    """Return the overrides with `--runs-dir` as `runs_dir=`, which wins over an earlier one."""
    if runs_dir is None:
        return overrides
    return [*overrides, override_with_text("runs_dir", str(runs_dir))]
