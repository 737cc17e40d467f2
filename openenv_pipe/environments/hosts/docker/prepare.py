"""Build or pull the image of an environment before a run has a folder."""

import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from openenv_pipe.environments.hosts.docker.daemon import (
    DaemonErrors,
    connect,
    in_thread,
    refusal,
)
from openenv_pipe.environments.hosts.docker.image import ensure_image, find_image, image_recipe

if TYPE_CHECKING:
    from openenv_pipe.config.schema import DockerHostConfig, EnvConfig


async def prepare_image(
    env: "EnvConfig", config: "DockerHostConfig", tell: Callable[[str], None]
) -> None:
    """Make sure that the daemon has the image; `tell` it to the user if that takes long.

    Raises:
        HostError: no daemon answers, or the image cannot be built or pulled; the log is kept.
        ConfigError: there is nothing to build it from, or no `docker` command to build it with.
    """
    recipe = image_recipe(env, config)
    client = await in_thread(connect)
    try:
        if await in_thread(find_image, client, recipe.name) is not None:
            return
        tell(f"docker {recipe.arguments[0]} of {recipe.name}, which may take minutes")
        logs = Path(tempfile.mkdtemp(prefix="openenv-pipe-image-"))
        try:
            await ensure_image(client, recipe, logs / "docker.log", config.build_timeout_s)
        except BaseException:
            with suppress(OSError):
                logs.rmdir()  # which fails if there is a log
            raise
        shutil.rmtree(logs, ignore_errors=True)
    except DaemonErrors as error:
        raise refusal(error) from error
    finally:
        client.close()
