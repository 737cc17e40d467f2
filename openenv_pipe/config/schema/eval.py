"""`eval`: the same tasks for every model that is evaluated."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from openenv_pipe.config.schema.base import Block


class StopConfig(Block):
    """What an evaluation during training has to show for training to end. at null: nothing."""

    measure: Literal["success", "reward"]
    bound: Literal["mean", "low"] = Field(description="low: of the interval, so no luck will do")
    at: float | None


class DuringConfig(Block):
    """Evaluations between the steps of GRPO: the same tasks and seeds each time."""

    every: NonNegativeInt = Field(description="steps; 0: none")
    num_tasks: PositiveInt | None = Field(description="the first so many; null: eval.num_tasks")
    samples_per_task: PositiveInt | None = Field(description="null: eval.samples_per_task")
    stop: StopConfig

    @model_validator(mode="after")
    def _stops_at_an_evaluation(self) -> "DuringConfig":
        if self.stop.at is not None and not self.every:
            raise ValueError(
                f"stop.at={self.stop.at:g} is asked of evaluations during training, and every=0 "
                "means none; set every to a number of steps"
            )
        return self


class EvalConfig(Block):
    """The same tasks and seeds for every model that is evaluated."""

    num_tasks: PositiveInt
    samples_per_task: PositiveInt = Field(description="n of pass@k; k goes up to it")
    temperature: NonNegativeFloat = Field(description="0: greedy")
    greedy: bool = Field(description="each task once more at temperature 0, as a row of its own")
    baselines: bool = Field(description="the scripted players of env.baselines, as rows")
    num_resamples: PositiveInt = Field(description="of the bootstrap")
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)]
    during: DuringConfig

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "EvalConfig":
        if self.greedy and not self.temperature:
            raise ValueError(
                "greedy=true plays once more what temperature=0 plays; set a temperature, "
                "such as 1.0, or greedy=false"
            )
        if (self.during.num_tasks or 0) > self.num_tasks:
            raise ValueError(
                f"during.num_tasks={self.during.num_tasks} is more than num_tasks={self.num_tasks}"
            )
        return self
