"""`trainer.checkpoint`: when checkpoints are written, and which are kept."""

from typing import Literal

from pydantic import Field, model_validator

from openenv_pipe.config.schema.base import Block, Positive, PositiveCount

OF_EVALUATIONS = ("eval/success", "eval/reward")


class BestConfig(Block):
    """Which checkpoint `checkpoints/best` points to. The best so far is saved as soon as it is."""

    metric: str = Field(
        description="the metric that decides: a key of metrics.jsonl in the step whose episodes "
        "the checkpoint's weights have played, or eval/success or eval/reward of the evaluations "
        "that eval.during makes",
        examples=["reward/mean"],
    )
    direction: Literal["max", "min"] = Field(description="whether a high or a low value is best")

    @model_validator(mode="after")
    def _evaluations_have_two(self) -> "BestConfig":
        if self.metric.startswith("eval/") and self.metric not in OF_EVALUATIONS:
            raise ValueError(
                f"metric={self.metric!r}: evaluations have only {' and '.join(OF_EVALUATIONS)}"
            )
        return self


class CheckpointConfig(Block):
    """When checkpoints are written, and which are kept (conf/trainer/grpo.yaml)."""

    every: PositiveCount = Field(
        description="steps between checkpoints; the last step always has one"
    )
    every_minutes: Positive | None = Field(
        description="after so many minutes without a checkpoint, the next step ends with one that "
        "only serves `--resume`, and that the next checkpoint replaces; null: none"
    )
    keep_last: PositiveCount | None = Field(
        description="how many of the newest are kept beside the best; null: all. A checkpoint "
        "without a value of best.metric is never deleted"
    )
    num_resumable: PositiveCount = Field(
        description="how many of the newest keep the optimizer's state, which `--resume` needs "
        "and which is twice the size of the trained weights"
    )
    best: BestConfig | None = Field(
        description="null: no best checkpoint is chosen, and none saved beside the others"
    )
