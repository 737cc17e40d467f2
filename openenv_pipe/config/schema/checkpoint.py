"""`trainer.checkpoint`: when checkpoints are written, and which of them stay."""

from typing import Literal

from pydantic import Field, PositiveInt

from openenv_pipe.config.schema.base import Block


class BestConfig(Block):
    """Which checkpoint `checkpoints/best` points to, by the metrics of its step."""

    metric: str = Field(
        description="of metrics.jsonl, or eval/success and eval/reward, those of eval.during",
        examples=["reward/mean"],
    )
    direction: Literal["max", "min"]


class CheckpointConfig(Block):
    """When checkpoints are written, and which of them stay."""

    every: PositiveInt = Field(description="steps; the last step has one in any case")
    keep_last: PositiveInt | None = Field(
        description="beside the best; null: all. None goes whose metric is missing"
    )
    num_resumable: PositiveInt = Field(description="of the last: only they keep the optimizer")
    best: BestConfig | None
