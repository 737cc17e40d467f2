"""`eval`: the evaluation, with the same tasks and seeds for every model."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from openenv_pipe.config.schema.base import (
    MIN_TEMPERATURE,
    Block,
    Count,
    Number,
    NumEpisodes,
    Share,
    refuse_too_many,
)


class StopConfig(Block):
    """The result of an evaluation during training at which training stops."""

    measure: Literal["success", "reward"] = Field(description="the mean that is compared")
    bound: Literal["mean", "low"] = Field(
        description="mean: the mean itself; low: the lower end of its confidence interval, so that "
        "luck does not suffice"
    )
    at: Number | None = Field(description="stop from this value on; null: never")


class DuringConfig(Block):
    """Evaluations during GRPO training, with the same tasks and seeds each time."""

    every: Count = Field(description="steps between evaluations; 0: none")
    num_tasks: NumEpisodes | None = Field(
        description="number of tasks, the first ones; null: eval.num_tasks"
    )
    samples_per_task: NumEpisodes | None = Field(
        description="episodes per task; null: eval.samples_per_task"
    )
    stop: StopConfig

    @model_validator(mode="after")
    def _stops_at_an_evaluation(self) -> "DuringConfig":
        if self.stop.at is not None and not self.every:
            raise ValueError(
                f"stop.at={self.stop.at:g} needs evaluations during training, and every=0 means "
                "none; set every to a number of steps"
            )
        return self


class EvalConfig(Block):
    """The evaluation of a model (conf/eval/default.yaml)."""

    num_tasks: NumEpisodes = Field(
        description="tasks of env.tasks.eval; more make the confidence intervals narrower"
    )
    samples_per_task: NumEpisodes = Field(
        description="episodes per task: the n of pass@k, and the largest k"
    )
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = Field(
        description="sampling temperature; 0: greedy"
    )
    greedy: bool = Field(description="true: one more row, with each task played at temperature 0")
    baselines: bool = Field(description="true: further rows, one for each policy of env.baselines")
    num_resamples: Annotated[int, Field(ge=1, le=10**6)] = Field(
        description="resamples of the bootstrap; more make the intervals' ends more exact"
    )
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        description="confidence level of the intervals"
    )
    min_scored_share: Share = Field(
        description="fraction of the tasks that have to be scored, which means that one of their "
        "episodes has a reward, for an interval, a proof of a change, an early stop and the best "
        "checkpoint"
    )
    during: DuringConfig

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "EvalConfig":
        if self.greedy and not self.temperature:
            raise ValueError(
                "greedy=true adds a row at temperature 0, and temperature=0 is that already; set "
                "a temperature, such as 1.0, or greedy=false"
            )
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature:g} is between 0 and {MIN_TEMPERATURE}; set "
                "0 for greedy sampling, or a higher temperature"
            )
        refuse_too_many("num_tasks", self.num_tasks, "samples_per_task", self.samples_per_task)
        refuse_too_many(
            *("num_resamples", self.num_resamples, "num_tasks", self.num_tasks), limit=10**8
        )
        stop = self.during.stop
        if stop.at is not None and stop.bound == "low":
            num_tasks = self.during.num_tasks or self.num_tasks
            if num_tasks == 1:
                raise ValueError(
                    f"during.stop.at={stop.at:g} with stop.bound=low and one task: an interval "
                    "needs at least two; set more tasks, or during.stop.bound=mean"
                )
        if (self.during.num_tasks or 0) > self.num_tasks:
            raise ValueError(
                f"during.num_tasks={self.during.num_tasks} is more than num_tasks={self.num_tasks}"
            )
        return self
