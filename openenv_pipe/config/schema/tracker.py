"""`tracker`: where metrics go beside metrics.jsonl, which is always written."""

from typing import Annotated, Literal

from pydantic import Field

from openenv_pipe.config.schema.base import Block, PythonTarget


class NoTrackerConfig(Block):
    """Metrics go nowhere else."""

    type: Literal["none"]


class TensorboardTrackerConfig(Block):
    """TensorBoard event files in the run folder."""

    type: Literal["tensorboard"]


class PythonTrackerConfig(PythonTarget):
    """An `openenv_pipe.trackers.Tracker` of your own: target(run_folder, **options)."""


TrackerConfig = Annotated[
    NoTrackerConfig | TensorboardTrackerConfig | PythonTrackerConfig,
    Field(discriminator="type"),
]
