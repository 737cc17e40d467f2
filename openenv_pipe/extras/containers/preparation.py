"""Get the images of containers that a run needs, before it has a folder."""

from collections.abc import Callable

from openenv_pipe.config.schema import RunConfig
from openenv_pipe.extras.containers.schema import DockerHostConfig, DockerSandboxConfig


async def prepare(config: RunConfig, notify: Callable[[str], None]) -> None:
    """Build or pull the images of `host=docker` and `agent/sandbox=docker` that the daemon lacks.

    Raises ConfigError and HostError.
    """
    programs = getattr(config.agent, "sandbox", None)
    environments = [
        (each.env, each.host)
        for each in config.environments.values()
        if isinstance(each.host, DockerHostConfig)
    ]
    if not environments and not isinstance(programs, DockerSandboxConfig):
        return
    # Imported late, because Docker's SDK takes a while.
    from openenv_pipe.extras.containers.docker.image import image_recipe, prepare_image
    from openenv_pipe.extras.containers.docker.sandbox import program_recipe

    for env, host in environments:
        await prepare_image(image_recipe(env, host), host.build_timeout_s, notify)
    if isinstance(programs, DockerSandboxConfig):
        await prepare_image(program_recipe(programs), programs.build_timeout_s, notify)
