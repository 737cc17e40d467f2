"""`host=attach`: environment servers that others start and stop.

schema          the keys
unused          keys that have no effect
host            the servers, behind TLS and tokens, slow, full, gone and back
"""

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
