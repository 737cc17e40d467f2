"""A connection to the Docker daemon whose containers end with it, or with this process."""

import asyncio
import shutil
from contextlib import ExitStack
from pathlib import Path

import docker

from openenv_pipe.extras.containers.docker.daemon import (
    LOGS,
    OWNER,
    DaemonErrors,
    connect,
    in_thread,
    rejection,
    remove_orphans,
)
from openenv_pipe.extras.containers.docker.image import Image, Recipe, ensure_image
from openenv_pipe.extras.containers.docker.start_guard import (
    GUARD_LIMIT_S,
    owner_label,
    start_guard,
    wait_for_guard,
)
from openenv_pipe.system.files import socket_folder

LOG = "docker.log"  # of builds, and of the guard


class GuardedDaemon:
    """The client, the image, the labels and the folder that the containers of one host share.

    Containers with its labels are removed by a guard process (`guard.py`).
    """

    def __init__(self, log_dir: Path) -> None:
        self.client: docker.DockerClient
        self.image: Image
        self.folder: Path  # of sockets and files to mount; only this user can open it
        self.labels = {OWNER: owner_label(), LOGS: str(log_dir.absolute())}
        self._log = log_dir / LOG
        self._opened = ExitStack()

    async def open(self, recipe: Recipe, build_timeout_s: float) -> None:
        """Connect, remove containers of dead runs, start the guard, and build a missing image.

        Raises HostError and ConfigError.
        """
        try:
            self.client = await in_thread(connect)
            self._opened.callback(self.client.close)
            await in_thread(remove_orphans, self.client)
            self.folder = socket_folder("openenv-pipe-")
            self._opened.callback(shutil.rmtree, self.folder, ignore_errors=True)
            guard = start_guard(self.labels[OWNER], self.folder, self._log)
            self._opened.callback(guard.stop, GUARD_LIMIT_S)
            self.image = await ensure_image(self.client, recipe, self._log, build_timeout_s)
            await wait_for_guard(guard, self.folder)
        except BaseException as error:
            await self.close()
            if isinstance(error, DaemonErrors):
                raise rejection(error) from error
            raise

    async def close(self) -> None:
        await asyncio.to_thread(self._opened.close)
