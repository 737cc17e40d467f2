"""The commands of `openenv-pipe engine`: help and arguments. The work is in engines/."""

from enum import StrEnum
from typing import Annotated

import typer

from openenv_pipe.cli.progress import tell_person

app = typer.Typer(help="Engines: install what they need.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `install` a command of its own while it is the only one."""


class Engine(StrEnum):
    """Those that need an installation of their own."""

    VLLM = "vllm"


class Build(StrEnum):
    """Of vLLM."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@app.command()
def install(
    engine: Annotated[Engine, typer.Argument(help="Which one.")],
    build: Annotated[
        Build, typer.Option(help="auto: CUDA where there is a GPU, else CPU.")
    ] = Build.AUTO,
    extra_index_url: Annotated[
        str | None, typer.Option(help="Packages from there too, such as CPU builds of torch.")
    ] = None,
) -> None:
    """Install an engine into an environment of its own, in the user's cache, and try it.

    \b
    openenv-pipe engine install vllm
    """
    from openenv_pipe.engines.vllm import install as vllm

    chosen = vllm.find_build() if build is Build.AUTO else build.value
    known = vllm.find_installed(chosen)
    installed = known or vllm.install(chosen, tell_person, extra_index_url)
    state = "is already installed" if known else f"installed in {installed.took_s:.0f} s"
    print(f"{installed.package} {installed.version} {state}: {vllm.environment_dir(chosen)}")
