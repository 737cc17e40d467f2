"""The commands of `openenv-pipe engine`: help and arguments. The work is in engines/."""

import sys
from typing import Annotated, Literal

import typer

from openenv_pipe.cli.progress import tell_person
from openenv_pipe.errors import EngineMissingError

app = typer.Typer(help="Engines: install what they need.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make typer treat `install` as a subcommand although it is the only one."""


@app.command()
def install(
    engine: Annotated[Literal["vllm"], typer.Argument(help="The engine to install.")],
    build: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="auto: CUDA where there is a GPU, else CPU."),
    ] = "auto",
    extra_index_url: Annotated[
        str | None, typer.Option(help="Another package index, such as one of CPU builds of torch.")
    ] = None,
) -> None:
    """Install an engine into an environment of its own, in the user's cache, and try it.

    \b
    openenv-pipe engine install vllm
    """
    from openenv_pipe.engines.vllm import install as vllm

    chosen = vllm.find_build() if build == "auto" else build
    known = vllm.find_installed(chosen)
    installed = known or vllm.install(chosen, tell_person, extra_index_url)
    state = "is already installed" if known else f"installed in {installed.took_s:.0f} s"
    print(f"{installed.package} {installed.version} {state}: {vllm.environment_dir(chosen)}")


def offer_installation(missing: EngineMissingError) -> bool:
    """Ask on a terminal whether to install the engine now; return True if it is installed then."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"{missing}. Install it now, some gigabytes? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        return False
    from openenv_pipe.engines.vllm import install as vllm

    vllm.install(missing.build, tell_person)
    return True
