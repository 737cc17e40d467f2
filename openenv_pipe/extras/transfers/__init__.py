"""`engine.weight_transfer=broadcast` and `ipc`: all weights to vLLM servers, without files."""

from openenv_pipe.registry import BlockType, Extra

_BUILD = "openenv_pipe.extras.transfers.build"

EXTRA = Extra(
    name="transfers",
    blocks=(
        BlockType(
            block="engine.weight_transfer",
            type="broadcast",
            config="",
            build=f"{_BUILD}:build_broadcast",
            check=f"{_BUILD}:check_broadcast",
        ),
        BlockType(
            block="engine.weight_transfer",
            type="ipc",
            config="",
            build=f"{_BUILD}:build_ipc",
            check=f"{_BUILD}:check_ipc",
        ),
    ),
    rules="openenv_pipe.extras.transfers.rules:RULES",
)
