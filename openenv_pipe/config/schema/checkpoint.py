"""`trainer.checkpoint`: when checkpoints are written, and which of them stay."""

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from openenv_pipe.config.schema.base import Block

OF_EVALUATIONS = ("eval/success", "eval/reward")


class BestConfig(Block):
    """Which checkpoint `checkpoints/best` points to, by the metrics of its step."""

    metric: str = Field(
        description="of metrics.jsonl, or eval/success and eval/reward, those of eval.during",
        examples=["reward/mean"],
    )
    direction: Literal["max", "min"]

    @model_validator(mode="after")
    def _evaluations_have_two(self) -> "BestConfig":
        if self.metric.startswith("eval/") and self.metric not in OF_EVALUATIONS:
            raise ValueError(
                f"metric={self.metric!r}: of an evaluation there are {' and '.join(OF_EVALUATIONS)}"
            )
        return self


class CheckpointConfig(Block):
    """When checkpoints are written, and which of them stay."""

    every: PositiveInt = Field(description="steps; the last step has one in any case")
    keep_last: PositiveInt | None = Field(
        description="beside the best; null: all. None goes whose metric is missing"
    )
    num_resumable: PositiveInt = Field(description="of the last: only they keep the optimizer")
    best: BestConfig | None
