"""Get what a run needs on this machine, before it has a folder: models, images of containers.

`requirements` only looks. What is done here may take minutes, is done once, and serves later runs.
"""

from collections.abc import Callable

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.models.hub import provide_model
from openenv_pipe.registry import extras, load


async def prepare(config: RunConfig, notify: Callable[[str], None]) -> None:
    """Get the model if the engine needs one here, and let extras get what the configuration needs.

    Raises ConfigError and HostError.
    """
    if config.engine.capabilities.needs_tokenizer:
        await provide_model(config.model, notify)
    for extra in extras():
        if extra.prepare:
            await load(extra.prepare)(config, notify)
