"""The command `serve`: help and options. The work is in `serving/`, and in a run's own pipeline."""

from contextlib import closing
from typing import Annotated, Literal

import typer

from openenv_pipe.cli.arguments import Checkpoint, RunsDir, Trust, with_runs_dir
from openenv_pipe.cli.control import command_line, controlled
from openenv_pipe.cli.progress import build_progress, notify_user
from openenv_pipe.errors import ConfigError

Host = Annotated[
    str,
    typer.Option(
        help="0.0.0.0 serves other machines too: set VLLM_API_KEY first, or "
        "OPENENV_PIPE_TOKEN with --train."
    ),
]
Engine = Annotated[
    Literal["vllm", "local"] | None,
    typer.Option(
        help="vllm; or local, for small models: in this process, without vLLM.  "
        "[default: the run's own engine; local where vLLM is not installed]"
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(min=1, help="Most tokens of a conversation.  [default: env.max_episode_tokens]"),
]


def serve(
    run: Checkpoint,
    extra: Annotated[
        list[str],
        typer.Argument(
            metavar="-- VLLM ARGUMENTS",
            default_factory=list,
            help="Passed on to vLLM. With --train: further overrides.",
            show_default=False,
        ),
    ],
    train: Annotated[
        bool,
        typer.Option("--train", help="Train on what clients play: RUN is conf=NAME, or overrides."),
    ] = False,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    host: Host = "127.0.0.1",
    engine: Engine = None,
    max_model_len: MaxModelLen = None,
    runs_dir: RunsDir = None,
    trust: Trust = False,
) -> None:
    """Serve a trained model by the APIs of OpenAI (chat completions, Responses) and Anthropic.

    vLLM serves an adapter's base model too, as `base`. Runs until Ctrl-C. Requests must carry the
    key in the environment variable VLLM_API_KEY, or the one that is printed.

    With --train, starts a run whose episodes are played by programs that use openenv_pipe.client.

    \b
    openenv-pipe serve runs/wordle/latest
    openenv-pipe serve runs/wordle/0007@best --port 8001
    openenv-pipe serve runs/wordle/0007@start    # the model before training
    openenv-pipe serve runs/wordle/latest --engine vllm -- --gpu-memory-utilization 0.5
    openenv-pipe serve --train conf=client trainer.steps=20
    """
    if train:
        if (max_model_len, engine) != (None, None):
            raise ConfigError(
                "--max-model-len and --engine serve a trained model; with --train, set "
                "env.max_episode_tokens and engine=local or engine=vllm as overrides"
            )
        _train_clients(
            with_runs_dir([f"agent.host={host}", f"agent.port={port}", run, *extra], runs_dir)
        )
        return
    with closing(build_progress()) as progress, progress.phase("loading the libraries"):
        from openenv_pipe.extras.agents.serving.serve import serve_run

    serve_run(
        run,
        host=host,
        port=port,
        engine=engine,
        max_model_len=max_model_len,
        extra=extra,
        runs_dir=runs_dir,
        notify=notify_user,
        trust=trust,
    )


def _train_clients(overrides: list[str]) -> None:
    from openenv_pipe.config.compose import compose

    composed = compose(["agent=client", *overrides])
    with controlled() as control:
        from openenv_pipe import pipeline

        pipeline.train(composed, command_line(), control)
