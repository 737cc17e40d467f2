"""The commands of `openenv-pipe engine`: help and arguments."""

from typing import Annotated, Literal

import typer

from openenv_pipe.cli.completion import complete_override
from openenv_pipe.cli.progress import notify_user

BuildOption = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="auto: CUDA where there is a GPU, else CPU."),
]
app = typer.Typer(
    no_args_is_help=True,
    help="Engines: install what they need, and start their servers.\n\n\b\n"
    "openenv-pipe engine install vllm\n"
    "openenv-pipe engine command conf=wordle_qwen3\n",
)


@app.command()
def install(
    engine: Annotated[Literal["vllm"], typer.Argument(help="The engine to install.")],
    build: BuildOption = "auto",
    extra_index_url: Annotated[
        str | None, typer.Option(help="Another package index, such as that of torch's CPU builds.")
    ] = None,
) -> None:
    """Install an engine into an environment of its own, in the user's cache, and try it.

    \b
    openenv-pipe engine install vllm
    """
    from openenv_pipe.engines.vllm.installed import environment_dir, find_build, find_installed
    from openenv_pipe.extras.vllm_setup import install as setup

    chosen = find_build() if build == "auto" else build
    known = find_installed(chosen)
    installed = setup.install(chosen, notify_user, extra_index_url)
    state = "is already installed" if known else f"installed in {installed.took_s:.0f} s"
    print(f"{installed.package} {installed.version} {state}: {environment_dir(chosen)}")


@app.command()
def command(
    overrides: Annotated[
        list[str],
        typer.Argument(
            metavar="OVERRIDES",
            help="The arguments of `train`: conf=NAME and others, such as engine.url.",
            autocompletion=complete_override,
        ),
    ],
    form: Annotated[
        Literal["shell", "compose"],
        typer.Option("--format", help="A shell command, or a file for docker compose."),
    ] = "shell",
    build: BuildOption = "auto",
) -> None:
    """Print how to start the vLLM server that a run with engine.launch=attach needs.

    The server has to find the folder of the weights under the same path as the run.

    \b
    openenv-pipe engine command conf=wordle_qwen3
    openenv-pipe engine command conf=wordle_qwen3 --format compose > compose.yaml
    """
    from openenv_pipe.engines.vllm.installed import find_build
    from openenv_pipe.extras.vllm_setup.command import server_command

    print(server_command(overrides, find_build() if build == "auto" else build, form))
