"""`eval`: the same tasks for every model that is evaluated."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from openenv_pipe.config.schema.base import Block


class EvalConfig(Block):
    """The same tasks and seeds for every model that is evaluated."""

    num_tasks: PositiveInt
    samples_per_task: PositiveInt
    temperature: NonNegativeFloat = Field(description="0: greedy")
    num_resamples: PositiveInt = Field(description="of the bootstrap")
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)]
