"""The types of blocks that the core has, listed in the way in which an extra lists its own."""

from openenv_pipe.registry import BlockType, Extra

CORE = Extra(
    name="core",
    blocks=(
        BlockType(
            block="tracker",
            type="python",
            config="openenv_pipe.config.schema.tracker:PythonTrackerConfig",
            build="openenv_pipe.trackers.python:build_python_tracker",
            check="openenv_pipe.trackers.python:check_python_tracker",
        ),
    ),
)
