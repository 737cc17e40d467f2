"""A Docker daemon and a base image for the tests, on a machine that may have neither.

A running daemon is used as it is. If there is none and the tests run as root, this module starts
one, which ends with the tests. No registry is used: debootstrap makes the base image, a Debian with
the packages that an environment's server needs; it is made once and stays in the daemon. This
module installs no packages on the machine (`.ci/run` does) and changes no daemon that others have
started.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import docker

from openenv_pipe.errors import ConfigError, HostError
from openenv_pipe.extras.containers.docker.daemon import connect

BASE_IMAGE = "openenv-pipe-tests:bookworm-1"  # change the number when the recipe changes
PACKAGES = ("openenv>=0.10,<0.11", "uvicorn", "pip", "setuptools>=69")
START_LIMIT_S = 300.0  # a busy machine takes minutes
STOP_LIMIT_S = 60.0
BUILD_LIMIT_S = 900.0
LONGEST_QUOTE = 400  # characters of a log in an error message
# The Dockerfiles install only the environment itself: the base image has all its requirements.
SETTINGS = (
    "ENV PYTHONPATH=/opt/packages",
    "ENV PIP_NO_INDEX=1",
    "ENV PIP_NO_BUILD_ISOLATION=0",
    "ENV PIP_BREAK_SYSTEM_PACKAGES=1",
    "ENV PIP_ROOT_USER_ACTION=ignore",
)


# What dockerd logs where the kernel, or a container around it, does not allow a daemon.
FORBIDDEN = re.compile(
    r"not permitted|permission denied|read-only file system|not supported|not implemented"
    r"|no such device|iptables|nftables|cgroup",
    re.IGNORECASE,
)


class NoDaemonError(Exception):
    """The machine lacks something that a daemon needs, or forbids it."""


class BrokenDaemonError(Exception):
    """The machine has all that a daemon needs, but the daemon or the base image failed."""


@contextmanager
def docker_daemon(folder: Path) -> Iterator[docker.DockerClient]:
    """Yield a client of a daemon that has BASE_IMAGE; write logs to `folder`.

    Raises NoDaemonError and BrokenDaemonError.
    """
    prefer_the_cli_of_the_daemon()
    with running_daemon(folder / "dockerd.log") as client:
        if not client.images.list(BASE_IMAGE):
            make_base_image(client, folder / "base_image.log")
        yield client
        client.close()


def prefer_the_cli_of_the_daemon() -> None:
    """Put Debian's `docker`, which has BuildKit, first on PATH, before others that may lack it."""
    if Path("/usr/bin/docker").exists():
        os.environ["PATH"] = f"/usr/bin{os.pathsep}{os.environ['PATH']}"
    if shutil.which("docker") is None:
        raise NoDaemonError("the docker command is not installed")


@contextmanager
def running_daemon(log: Path) -> Iterator[docker.DockerClient]:
    """Yield a client of the daemon that runs already, or of one that is started here."""
    client = _client()
    if client is not None:
        yield client
        return
    if shutil.which("dockerd") is None:
        raise NoDaemonError("none answers, and dockerd is not installed")
    if os.geteuid() != 0:
        raise NoDaemonError("none answers, and only root may start one")
    with log.open("wb") as output:
        daemon = subprocess.Popen(["dockerd"], stdout=output, stderr=output)
    try:
        yield answering(daemon, log)
    finally:
        daemon.terminate()
        daemon.wait(STOP_LIMIT_S)


def _client() -> docker.DockerClient | None:
    with suppress(HostError, ConfigError):
        return connect()
    return None


def answering(daemon: subprocess.Popen, log: Path) -> docker.DockerClient:
    """Wait until the daemon answers, and return a client.

    Raises NoDaemonError and BrokenDaemonError.
    """
    deadline = time.monotonic() + START_LIMIT_S
    while daemon.poll() is None and time.monotonic() < deadline:
        if (client := _client()) is not None:
            return client
        time.sleep(0.2)
    said = log.read_text(errors="replace")[-LONGEST_QUOTE:]
    if daemon.poll() is not None and FORBIDDEN.search(said):
        raise NoDaemonError(f"this machine lets no dockerd run: {said}")
    raise BrokenDaemonError(f"dockerd does not answer: {said}")


def make_base_image(client: docker.DockerClient, log: Path) -> None:
    """Make Debian with Python and PACKAGES, without any registry. Takes about two minutes."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise NoDaemonError("its base image needs root and debootstrap")
    with TemporaryDirectory(prefix="openenv-pipe-tests-") as folder, log.open("wb") as output:
        root = Path(folder) / "root"

        def run(*command: str, failure: type[Exception] = NoDaemonError) -> None:
            """Run a command. By default its failure (of a download) counts as the machine's
            fault."""
            done = subprocess.run(command, stdout=output, stderr=output, timeout=BUILD_LIMIT_S)
            if done.returncode != 0:
                said = log.read_text(errors="replace")[-LONGEST_QUOTE:]
                raise failure(f"no base image: {said}")

        run("debootstrap", "--variant=minbase", "--include=python3", "bookworm", str(root))
        run(
            *(sys.executable, "-m", "pip", "install", "--quiet", "--target"),
            *(str(root / "opt" / "packages"), "--python-version", "3.11"),
            *("--only-binary", ":all:", *PACKAGES),
        )
        for name, command in (("pip", "python3 -m pip"), ("python", "python3")):
            script = root / "usr" / "local" / "bin" / name
            script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            script.chmod(0o755)
        archive = Path(folder) / "root.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(root, arcname=".", filter=_without_downloads)
        changes = [f"--change={line}" for line in SETTINGS]
        command = ("docker", "import", *changes, str(archive), BASE_IMAGE)
        run(*command, failure=BrokenDaemonError)


def _without_downloads(item: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if item.name.startswith("./var/cache/apt/archives/") else item
