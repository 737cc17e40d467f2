"""`tracker`: where metrics go beside metrics.jsonl, which is always written."""

from typing import Annotated, Literal

from pydantic import Field

from openenv_pipe.config.schema.base import Block, PythonTarget
from openenv_pipe.config.schema.registered import Registered


class TrackerBlock(Block):
    """Base of the trackers."""

    type: str


class PythonTrackerConfig(PythonTarget, TrackerBlock):
    """An `openenv_pipe.trackers.base.Tracker` of your own: target(run_folder, **options)."""

    type: Literal["python"]


TrackerConfig = Annotated[TrackerBlock, Registered("tracker")]
# A name is also that of a file in the run folder.
TrackerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w-]{0,63}$")]
TrackerConfigs = dict[TrackerName, TrackerConfig]
