"""`sweep`: which jobs `train -m` makes of several values. No part of any one run."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from openenv_pipe.config.schema.base import Block


class GridSweep(Block):
    """Every combination of the values once."""

    type: Literal["grid"]


class SearchSweep(Block):
    """Values that Optuna proposes by how the jobs before did; hopeless jobs are stopped."""

    type: Literal["search"]
    num_jobs: PositiveInt
    at_a_time: PositiveInt = Field(
        description="jobs proposed together, which a launcher such as joblib plays in parallel"
    )
    metric: str = Field(description="a key of metrics.jsonl, at the steps of GRPO")
    goal: Literal["max", "min"]
    mean_of: PositiveInt = Field(description="last steps; their mean is what a job is judged by")
    seed: NonNegativeInt = Field(description="of the proposals")
    num_random: NonNegativeInt = Field(description="first jobs, whose values are drawn at random")
    prune: bool = Field(description="stop jobs that are below the median of those before")
    num_unpruned: NonNegativeInt = Field(description="first jobs, which all go to their end")
    prune_from_step: NonNegativeInt


SweepConfig = Annotated[GridSweep | SearchSweep, Field(discriminator="type")]


class SweepSettings(Block):
    """The block with its name, as it is composed."""

    sweep: SweepConfig
