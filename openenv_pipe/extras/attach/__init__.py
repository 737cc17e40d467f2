"""`host=attach`: environment servers that others start and stop."""

from openenv_pipe.registry import BlockType, Extra

EXTRA = Extra(
    name="attach",
    blocks=(
        BlockType(
            block="host",
            type="attach",
            config="openenv_pipe.extras.attach.schema:AttachHostConfig",
            build="openenv_pipe.extras.attach.host:AttachHost",
        ),
    ),
    unused="openenv_pipe.extras.attach.unused:RULES",
)
