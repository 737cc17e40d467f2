"""The command `plan`: help and arguments. The work is in the modules beside it."""

import typer

from openenv_pipe.cli.arguments import Overrides


def plan(overrides: Overrides) -> None:
    """Estimate how a configuration would train on GPUs: memory, speed, and the bottleneck.

    Three keys describe the GPUs: cluster.nodes (1), cluster.gpus_per_node (8), and gpu (h100),
    which is a100, h100, h200, b200 or l40s. Nothing is started, loaded or downloaded. Exit code 1
    if the learner does not fit.

    \b
    openenv-pipe plan conf=wordle_qwen3 engine=vllm
    openenv-pipe plan conf=wordle_qwen3 engine=vllm model.path=Qwen/Qwen3-32B cluster.nodes=8
    openenv-pipe plan conf=wordle_qwen3 engine=vllm cluster.gpus_per_node=1 gpu=h200
    """
    from openenv_pipe.cli.console import print_table
    from openenv_pipe.config.compose import compose
    from openenv_pipe.extras.sizing.constants import split_cluster
    from openenv_pipe.extras.sizing.estimate import make_plan
    from openenv_pipe.extras.sizing.shapes import shape_of
    from openenv_pipe.extras.sizing.text import as_table, constants_table

    cluster, run = split_cluster(overrides)
    config = compose(["device=cuda", *run]).config  # with the defaults of a machine that has GPUs
    made = make_plan(config, shape_of(config.model), cluster)
    print_table(as_table(made))
    print()
    print_table(constants_table(made))
    if not made.fits:
        raise typer.Exit(1)
