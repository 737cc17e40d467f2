"""A type of tracker with keys of its own, which the schema checks."""

from openenv_pipe.registry import BlockType, Extra

EXTRA = Extra(
    name="example",
    blocks=(
        BlockType(
            block="tracker",
            type="lines",
            config="example_plugin.schema:LinesTrackerConfig",
            build="example_plugin.trackers:build_lines_tracker",
        ),
    ),
)
