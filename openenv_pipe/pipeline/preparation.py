"""Get what a run needs on this machine, before it has a folder: the environment's image.

`requirements` only looks. What is done here may take minutes, is done once, and serves later runs.
"""

from collections.abc import Callable

from openenv_pipe.config.schema import DockerHostConfig, RunConfig


async def prepare(config: RunConfig, tell: Callable[[str], None]) -> None:
    """Build or pull the image of `host=docker`, if the daemon does not have it.

    Raises:
        ConfigError: there is nothing to build it from, or no `docker` command.
        HostError: no daemon answers, or the image cannot be built or pulled.
    """
    if isinstance(config.host, DockerHostConfig):
        from openenv_pipe.environments.hosts.docker.prepare import prepare_image

        await prepare_image(config.env, config.host, tell)
