"""`engine.weight_transfer=broadcast` and `ipc`: all weights to vLLM servers, without files."""

from openenv_pipe.registry import BlockType, Extra

_BUILD = "openenv_pipe.extras.transfers.build"

EXTRA = Extra(
    name="transfers",
    blocks=tuple(
        BlockType(
            block="engine.weight_transfer",
            type=kind,
            config="",
            build=f"{_BUILD}:build_{kind}",
            check=f"{_BUILD}:check_{kind}",
        )
        for kind in ("broadcast", "ipc")
    ),
    rules="openenv_pipe.extras.transfers.rules:RULES",
)
