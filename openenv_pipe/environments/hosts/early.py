"""Begin to start a run's environment servers before the libraries of the run are loaded.

Loading torch and transformers takes about as long as a server's start, and uses another core. The
run takes over the host when it has a folder; if it never does, the servers end with the block.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openenv_pipe.config.schema import EnvConfig, ProcessHostConfig, RunConfig
from openenv_pipe.environments.hosts.process import ProcessHost
from openenv_pipe.errors import PipeError
from openenv_pipe.system.files import temporary_folder
from openenv_pipe.system.optional_packages import reject_missing_requirements
from openenv_pipe.system.resources import find_env


class EarlyHost:
    """A host whose servers have begun to start, with their logs in a temporary folder."""

    def __init__(self, host: ProcessHost, folder: Path) -> None:
        """folder: where the logs are."""
        self._host: ProcessHost | None = host
        self._folder = folder

    def take(self, logs: Path) -> ProcessHost | None:
        """Return the host, which belongs to the caller from then on, and move its logs.

        None if it was taken before.
        """
        host, self._host = self._host, None
        if host is not None:
            host.move_logs(logs)
            self._folder.rmdir()
        return host

    def close(self) -> None:
        """End the servers, if nobody has taken the host."""
        if self._host is not None:
            self._host.kill()


@contextmanager
def early_host(config: RunConfig) -> Iterator[EarlyHost | None]:
    """Yield a host of `host=process` whose servers are starting; None for other configurations.

    What cannot be started is left to the run, which rejects it with the reason.
    """
    env, kind = config.env, config.host
    if not isinstance(kind, ProcessHostConfig) or kind.port is not None or env.package is None:
        yield None
        return
    with temporary_folder(Path(config.runs_dir), ".start_") as folder:
        early = None if folder is None else _launched(env, kind, folder)
        try:
            yield early
        finally:
            if early is not None:
                early.close()


def _launched(env: EnvConfig, kind: ProcessHostConfig, folder: Path) -> EarlyHost | None:
    try:
        if env.package is not None and env.python is None:
            reject_missing_requirements(find_env(env.package))
        host = ProcessHost(env, kind, folder)
    except PipeError:
        return None
    try:
        host.launch()
    except OSError:
        host.kill()
        return None
    return EarlyHost(host, folder)
