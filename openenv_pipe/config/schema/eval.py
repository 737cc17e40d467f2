"""`eval`: the evaluation, with the same tasks and seeds for every model."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from openenv_pipe.config.schema.base import (
    MIN_TEMPERATURE,
    Block,
    Count,
    Number,
    NumEpisodes,
    Share,
)


def _zero_if_none(every: Any) -> Any:
    """Read null as 0, because null means never in other keys that say how often to do something."""
    return 0 if every is None else every


def _greedy_or_warm(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"{temperature:g} is between 0 and {MIN_TEMPERATURE}; set 0 for greedy decoding, or at "
            f"least {MIN_TEMPERATURE}"
        )
    return temperature


def _real_path(opponent: str) -> str:
    """Return the real path of a checkpoint, because links change and a relative path depends on the
    current folder. The name of a policy stays as it is."""
    return str(Path(opponent).expanduser().resolve()) if "/" in opponent else opponent


class StopConfig(Block):
    """The evaluation result at which training stops."""

    measure: Literal["success", "reward"] = Field(description="the mean that is compared")
    bound: Literal["mean", "low"] = Field(
        description="mean: the mean itself; low: the lower end of its confidence interval, so that "
        "luck does not suffice"
    )
    at: Number | None = Field(description="stop from this value on; null: never")


class DuringConfig(Block):
    """Evaluations during GRPO training, with the same tasks and seeds each time."""

    every: Annotated[Count, BeforeValidator(_zero_if_none)] = Field(
        description="steps between evaluations; 0 or null: none"
    )
    num_tasks: NumEpisodes | None = Field(
        description="number of tasks, the first ones; null: eval.num_tasks"
    )
    samples_per_task: NumEpisodes | None = Field(
        description="episodes per task; null: eval.samples_per_task"
    )
    stop: StopConfig


class EvalConfig(Block):
    """The evaluation of a model (conf/eval/default.yaml)."""

    num_tasks: NumEpisodes = Field(
        description="tasks of env.tasks.eval; more make the confidence intervals narrower"
    )
    samples_per_task: NumEpisodes = Field(
        description="episodes per task: the n of pass@k, and the largest k"
    )
    temperature: Annotated[float, Field(ge=0.0, le=100.0), AfterValidator(_greedy_or_warm)] = Field(
        description="sampling temperature; 0: greedy"
    )
    greedy: bool = Field(description="true: one more row, with each task played at temperature 0")
    baselines: bool = Field(description="true: further rows, one for each policy of env.baselines")
    opponent: Annotated[str, AfterValidator(_real_path)] | None = Field(
        description="with env.players, who plays all players but the evaluated one: a policy of "
        "env.baselines, or the folder of a checkpoint; null: as in training"
    )
    num_resamples: Annotated[int, Field(ge=1, le=10**6)] = Field(
        description="resamples of the bootstrap; more make the intervals' ends more exact"
    )
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        description="confidence level of the intervals"
    )
    min_scored_share: Share = Field(
        description="fraction of the tasks that have to be scored (have an episode with a reward); "
        "below it there is no interval, no proof of a change, no early stop and no best "
        "checkpoint; pass@k needs k scored samples in this fraction of the tasks"
    )
    during: DuringConfig
