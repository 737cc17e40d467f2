"""Host `attach`: environment servers that run already and that others start and stop.

If a server stops answering, its sessions are lost, as with a dead server. If it does not answer
again within `host.max_outage_s`, the host fails.
"""

import ssl
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from pydantic import JsonValue

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.environments.hosts.supervised import SupervisedHost
from openenv_pipe.errors import ConfigError, FailureError, HostError
from openenv_pipe.extras.attach.schema import AttachHostConfig
from openenv_pipe.system.http import Access
from openenv_pipe.system.readiness import (
    NotReadyError,
    check_health,
    wait_for_outage,
    wait_until_healthy,
)
from openenv_pipe.system.supervisor import RestartableServer

HTTP_SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}


class AttachHost(SupervisedHost):
    """A host of the servers at `config.urls`."""

    def __init__(self, env: EnvConfig, config: AttachHostConfig, logs: Path) -> None:
        """Prepare the host without connecting. Raises ConfigError if `ca_file` is unreadable."""
        access = Access(headers=dict(config.headers), tls=tls_context(config))
        self._config = config
        super().__init__(
            env,
            [AttachedEnvServer(env.name, url, config, access) for url in config.urls],
            sessions_per_server=config.sessions_per_server,
            restart=self._wait_for_return,
            access=access,
        )

    def facts(self) -> dict[str, JsonValue]:
        return {}

    async def _wait_for_return(self, server: RestartableServer, error: FailureError) -> None:
        limit_s = self._config.max_outage_s

        async def check(attempt_s: float) -> str | None:
            # Each attempt gets as much time as the first connection: the server may be slow.
            attempt_s = max(attempt_s, self._config.connect_timeout_s)
            return await check_health(server.url, attempt_s, self.access, use_proxy=True)

        try:
            await wait_until_healthy(server.url, timeout_s=limit_s, check=check)
        except NotReadyError:
            raise HostError(
                f"{error}, and did not answer again within host.max_outage_s={limit_s:g}"
            ) from None


class AttachedEnvServer:
    """A `system.supervisor.RestartableServer` that is neither started nor stopped."""

    log: Path | None = None

    def __init__(self, env_name: str, url: str, config: AttachHostConfig, access: Access) -> None:
        self.url = http_url(url)
        self._env_name = env_name
        self._timeout_s = config.connect_timeout_s
        self._access = access

    async def start(self) -> None:
        """Check that the server runs. Raises HostError if its first answer is not status 200."""
        if (seen := await self._check()) is not None:
            raise HostError(f"env {self._env_name!r}: {self.url}{self._explained(seen)}")

    async def died(self) -> str:
        return await wait_for_outage(self._check)

    async def stop(self) -> None:
        """Leave the server running."""

    async def _check(self) -> str | None:
        return await check_health(self.url, self._timeout_s, self._access, use_proxy=True)

    def _explained(self, seen: str) -> str:
        if seen in ("401", "403"):
            return (
                f" rejects access with status {seen}; set host.headers, such as "
                "'host.headers.Authorization=Bearer ${oc.env:MY_TOKEN}'"
            )
        if seen.isdigit():
            return f"/health answers {seen}, expected 200 of an OpenEnv server; check host.urls"
        if "CERTIFICATE_VERIFY_FAILED" in seen:
            return (
                f": its certificate is not trusted: {seen}; set host.ca_file to the file of the "
                "authority that signed it"
            )
        if "SSL" in seen:
            return f": TLS fails: {seen}; use http:// in host.urls if the server has no TLS"
        return (
            f" cannot be reached: {seen}; check that the server runs and that this machine can "
            "reach it"
        )


def http_url(url: str) -> str:
    """Return a server's address as an http or https URL, without `/ws` at its end."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/").removesuffix("/ws")
    return urlunsplit((HTTP_SCHEMES[parts.scheme], parts.netloc, path, "", ""))


def tls_context(config: AttachHostConfig) -> ssl.SSLContext:
    """Return a context that trusts the system's authorities and those of `host.ca_file`.

    With `host.verify_tls=false` it trusts every server. Raises ConfigError.
    """
    context = ssl.create_default_context()
    if not config.verify_tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if config.ca_file is not None:
        try:
            context.load_verify_locations(config.ca_file)
        except OSError as error:
            raise ConfigError(
                f"host.ca_file={config.ca_file!r} cannot be read: {error}; expected a file of "
                "certificates in PEM"
            ) from error
    return context
