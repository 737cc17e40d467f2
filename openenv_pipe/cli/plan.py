"""The command `plan`: help and arguments. The work is in commands/plan/."""

from typing import Annotated, Literal

import typer

from openenv_pipe.cli.arguments import Overrides


def plan(
    overrides: Overrides,
    nodes: Annotated[int, typer.Option(min=1, max=1000, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, max=16, help="GPUs of each machine.")] = 8,
    gpu: Annotated[
        Literal["a100", "h100", "h200", "b200", "l40s"], typer.Option(help="Their kind.")
    ] = "h100",
) -> None:
    """Estimate what GPUs give for a configuration: memory, speed, and the bottleneck.

    Nothing is started, loaded or downloaded. Exit code 1 if the learner does not fit.

    \b
    openenv-pipe plan conf=wordle_qwen3 engine=vllm
    openenv-pipe plan conf=wordle_qwen3 engine=vllm model.path=Qwen/Qwen3-32B --nodes 8
    openenv-pipe plan conf=wordle_qwen3 engine=vllm --gpus-per-node 1 --gpu h200
    """
    from openenv_pipe.cli.console import print_table
    from openenv_pipe.commands import plan as planning
    from openenv_pipe.config.compose import compose

    config = compose(overrides).config
    cluster = planning.Cluster(gpu=planning.GPUS[gpu], num_nodes=nodes, gpus_per_node=gpus_per_node)
    made = planning.make_plan(config, planning.shape_of(config.model), cluster)
    print_table(planning.as_table(made))
    print()
    print_table(planning.constants_table(made))
    if not made.fits:
        raise typer.Exit(1)
