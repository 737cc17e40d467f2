"""The image of an environment: built from its package, or pulled by name.

The `docker` command builds and pulls, because the SDK has neither BuildKit, which OpenEnv's own
Dockerfiles need, nor the user's logins. A built image is tagged with the digest of its inputs, so
the same inputs are built once. A newer base image under the same name is not noticed; remove the
image to have it built again.
"""

import asyncio
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.errors import ImageNotFound
from docker.utils.build import exclude_paths

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.environments.hosts.package import digest_of_files
from openenv_pipe.errors import ConfigError, HostError
from openenv_pipe.extras.containers.docker.daemon import (
    DaemonErrors,
    connect,
    daemon_address,
    in_thread,
    rejection,
)
from openenv_pipe.extras.containers.schema import DockerHostConfig
from openenv_pipe.system.child_environment import DOCKER, child_environment
from openenv_pipe.system.process import ManagedProcess
from openenv_pipe.system.resources import find_env

STOP_LIMIT_S = 5.0
BUILT_BY = "openenv-pipe.built-from"  # label: the package's folder


@dataclass(frozen=True, slots=True)
class Image:
    name: str
    id: str  # sha256:...
    start: tuple[str, ...]  # the image's ENTRYPOINT and CMD
    ports: tuple[int, ...]  # TCP ports that it exposes


@dataclass(frozen=True, slots=True)
class Recipe:
    """The name of an image, and the arguments of `docker` that build or pull it."""

    name: str
    arguments: tuple[str, ...]
    block: str = "host"  # of the configuration, which names the image and the time limit


def pull_recipe(image: str, block: str) -> Recipe:
    """Return how to get an image by its name. block: the key of the block that names it."""
    return Recipe(image, ("pull", image), block)


def image_recipe(env: EnvConfig, config: DockerHostConfig) -> Recipe:
    """Return how to get the image. Raises ConfigError if there is nothing to build it from."""
    if config.image is not None:
        return pull_recipe(config.image, "host")
    if env.package is None:
        raise ConfigError(
            f"env {env.name!r} has no env.package to build an image from; set it, or host.image"
        )
    package = find_env(env.package)
    dockerfile = package / config.dockerfile
    if not dockerfile.is_file():
        raise ConfigError(
            f"env {env.name!r}: there is no {dockerfile}; write one, set host.dockerfile to "
            "another file of the package, or host.image to an image that exists"
        )
    repository = re.sub(r"[^a-z0-9]+", "-", env.name.lower()).strip("-") or "env"
    digest = content_digest(package, config.dockerfile, config.build_args)
    name = f"openenv-pipe/{repository}:{digest[:16]}"
    arguments = [
        *("build", "--progress=plain", "--file", str(dockerfile), "--tag", name),
        *("--label", f"{BUILT_BY}={package}"),
        *(f"--build-arg={key}={value}" for key, value in config.build_args.items()),
        str(package),
    ]
    return Recipe(name, tuple(arguments))


def content_digest(package: Path, dockerfile: str, build_args: Mapping[str, str]) -> str:
    """Return the sha256 of a build's inputs: arguments, and files except those in .dockerignore."""
    ignored = package / ".dockerignore"
    lines = ignored.read_text().splitlines() if ignored.is_file() else []
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    files = exclude_paths(str(package), patterns, dockerfile=dockerfile)
    arguments = "".join(f"+{key}={value}" for key, value in sorted(build_args.items()))
    return digest_of_files(package, files, arguments)


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


async def ensure_image(
    client: docker.DockerClient, recipe: Recipe, log: Path, timeout_s: float
) -> Image:
    """Return the image, after building or pulling it if the daemon does not have it.

    Raises HostError and ConfigError.
    """
    found = await in_thread(find_image, client, recipe.name)
    if found is None:
        await _run_docker(recipe, log, timeout_s)
        found = await in_thread(find_image, client, recipe.name)
    if found is None:
        raise HostError(
            f"`docker {recipe.arguments[0]}` succeeded, but there is no image {recipe.name}", log
        )
    return found


def find_image(client: docker.DockerClient, name: str) -> Image | None:
    """Return the image of this name, if the daemon has it. Blocks."""
    try:
        image = client.images.get(name)
    except ImageNotFound:
        return None
    settings = image.attrs["Config"]
    start = [*(settings.get("Entrypoint") or ()), *(settings.get("Cmd") or ())]
    exposed = [port.partition("/") for port in settings.get("ExposedPorts") or ()]
    ports = sorted(int(number) for number, _, kind in exposed if kind != "udp")
    return Image(name, image.id, tuple(start), tuple(ports))


async def _run_docker(recipe: Recipe, log: Path, timeout_s: float) -> None:
    action = f"`docker {recipe.arguments[0]}` of {recipe.name}"
    if shutil.which("docker") is None:
        raise ConfigError(
            f"{action} needs the `docker` command, which is not on PATH; install it with BuildKit, "
            f"or set {recipe.block}.image to an image that the daemon has"
        )
    given = {"DOCKER_BUILDKIT": "1", "DOCKER_HOST": daemon_address()}
    process = ManagedProcess(
        ["docker", *recipe.arguments], log=log, environment=child_environment(*DOCKER) | given
    )
    try:
        async with asyncio.timeout(timeout_s):
            await process.exited()
    except TimeoutError:
        raise HostError(
            f"{action} took longer than {recipe.block}.build_timeout_s={timeout_s:g}", log
        ) from None
    finally:
        await asyncio.to_thread(process.stop, STOP_LIMIT_S)
    if process.returncode != 0:
        raise HostError(f"{action} failed with exit code {process.returncode}", log)
