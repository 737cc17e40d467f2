"""The command `reproduce`: help and arguments."""

from pathlib import Path
from typing import Annotated

import typer

from openenv_pipe.cli.arguments import RunsDir, Trust
from openenv_pipe.cli.completion import complete_run
from openenv_pipe.cli.control import command_line, controlled

DIFFERENT = 3  # the exit code of a reproduction that differs


def reproduce(
    run: Annotated[
        str,
        typer.Argument(
            help="A run: its folder, its id, latest; or a recording.", autocompletion=complete_run
        ),
    ],
    steps: Annotated[
        int | None, typer.Option(min=1, help="Run only this many steps of GRPO.")
    ] = None,
    allow: Annotated[
        str, typer.Option(help="What may differ: code,versions,data,model, or some of them.")
    ] = "",
    replay: Annotated[
        bool, typer.Option("--replay", help="Train on the recorded episodes, and play none.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Run nothing: write a recording of the run, without weights."
        ),
    ] = None,
    runs_dir: RunsDir = None,
    trust: Trust = False,
) -> None:
    """Repeat a run and compare the two. Exit code 0: they are the same, 3: they differ.

    The new run goes to the folder of runs that the run names, or to --runs-dir.

    \b
    openenv-pipe reproduce wordle/0007
    openenv-pipe reproduce runs/wordle/0007 --steps 2
    openenv-pipe reproduce latest --replay --allow code
    openenv-pipe reproduce wordle/0007 --record tests/recordings/wordle --steps 2
    """
    if record is not None:
        from openenv_pipe.extras.reproduce.recording import record as write_recording

        write_recording(run, record, steps=steps, runs_dir=runs_dir)
        print(
            f"recorded; to test a change with it: openenv-pipe reproduce {record} --replay --trust "
            "--allow code"
        )
        return
    from openenv_pipe.extras.reproduce.command import reproduce as reproduce_run

    kinds = [kind.strip() for kind in allow.split(",") if kind.strip()]
    with controlled() as control:
        reproduction = reproduce_run(
            run,
            steps=steps,
            allow=kinds,
            is_replay=replay,
            runs_dir=runs_dir,
            command=command_line(),
            control=control,
            trust=trust,
        )
    raise typer.Exit(0 if reproduction.is_same else DIFFERENT)
