"""The keys of the plugin's own types."""

from typing import Literal

from pydantic import Field

from openenv_pipe.config.schema.tracker import TrackerBlock


class LinesTrackerConfig(TrackerBlock):
    """Every record as a line of JSON."""

    type: Literal["lines"]
    file_name: str = Field(description="of the file in the run folder")
