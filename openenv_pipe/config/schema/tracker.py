"""`tracker`: where metrics go as well."""

from typing import Literal

from openenv_pipe.config.schema.base import Block


class TrackerConfig(Block):
    """Where metrics go beside metrics.jsonl, which is always written."""

    type: Literal["none", "tensorboard"]
