"""Build or pull an image before a run has a folder."""

import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from openenv_pipe.extras.containers.docker.daemon import DaemonErrors, connect, in_thread, rejection
from openenv_pipe.extras.containers.docker.image import Recipe, ensure_image, find_image


async def prepare_image(recipe: Recipe, timeout_s: float, notify: Callable[[str], None]) -> None:
    """Make sure that the daemon has the image; `notify` is called if that takes long.

    Raises HostError and ConfigError.
    """
    client = await in_thread(connect)
    try:
        if await in_thread(find_image, client, recipe.name) is not None:
            return
        notify(f"docker {recipe.arguments[0]} of {recipe.name}, which may take minutes")
        logs = Path(tempfile.mkdtemp(prefix="openenv-pipe-image-"))
        try:
            await ensure_image(client, recipe, logs / "docker.log", timeout_s)
        except BaseException:
            with suppress(OSError):
                logs.rmdir()  # which fails if there is a log
            raise
        shutil.rmtree(logs, ignore_errors=True)
    except DaemonErrors as error:
        raise rejection(error) from error
    finally:
        client.close()
