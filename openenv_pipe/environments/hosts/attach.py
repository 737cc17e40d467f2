"""Environment servers that run elsewhere: their health is asked for, their life is not ours.

A server that goes away takes its sessions with it, as a dead one does. It gets `max_outage_s` to
answer again; then the host fails. Refused here: starting and stopping servers, and going on with
a session that was lost.
"""

import asyncio
import http.client
import ssl
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from pydantic import JsonValue

from openenv_pipe.environments.hosts.base import Server
from openenv_pipe.environments.hosts.supervised import SupervisedHost
from openenv_pipe.errors import ConfigError, FailureError, HostError
from openenv_pipe.system.http import Access, ask

if TYPE_CHECKING:
    from openenv_pipe.config.schema import AttachHostConfig, EnvConfig

POLL_S = 1.0
NUM_MISSED = 3  # answers in a row that are missing when a server is taken for gone
HTTP_SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}


class AttachHost(SupervisedHost):
    """Sessions with the servers at `config.urls`."""

    def __init__(self, env: "EnvConfig", config: "AttachHostConfig") -> None:
        """Connects to nothing yet. Raises ConfigError for a `ca_file` that is none."""
        access = Access(headers=dict(config.headers), tls=tls_context(config))
        self._config = config
        super().__init__(
            env,
            [AttachedServer(env.name, url, config, access) for url in config.urls],
            sessions_per_server=config.sessions_per_server,
            max_restarts=0,  # ours to wait for, not to restart: see _revive
            access=access,
        )

    def facts(self) -> dict[str, JsonValue]:
        """See `Host.facts`. What code runs elsewhere is not known."""
        return {}

    async def _revive(self, server: Server, error: FailureError) -> None:
        """Wait for a server to answer again. Raises HostError after `max_outage_s`."""
        limit_s = self._config.max_outage_s
        try:
            async with asyncio.timeout(limit_s):
                while await server.look() is not None:
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise HostError(
                f"{error}, and did not come back within host.max_outage_s={limit_s:g}"
            ) from None


class AttachedServer:
    """See `hosts.base.Server`."""

    log: Path | None = None

    def __init__(self, env_name: str, url: str, config: "AttachHostConfig", access: Access) -> None:
        self.url = http_url(url)
        self._env_name = env_name
        self._timeout_s = config.connect_timeout_s
        self._access = access

    async def start(self) -> None:
        """Look whether it runs. Raises HostError at the first answer that says no."""
        seen = await self.look()
        if seen is not None:
            raise HostError(f"env {self._env_name!r}: {self.url}{self._explained(seen)}")

    async def died(self) -> str:
        """Return when it has missed several answers in a row, with what was seen instead."""
        num_missed, seen = 0, None
        while num_missed < NUM_MISSED:
            await asyncio.sleep(POLL_S)
            seen = await self.look()
            num_missed = 0 if seen is None else num_missed + 1
        return f"no answer {NUM_MISSED} times in a row, the last time: {seen}"

    async def stop(self) -> None:
        """Nothing: it is not ours."""

    async def look(self) -> str | None:
        """None if /health answers 200, else the status or the error. Never raises."""
        try:
            status, _ = await ask(
                self.url, "/health", timeout_s=self._timeout_s, access=self._access
            )
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        except (OSError, ValueError, http.client.HTTPException) as error:
            return str(error) or type(error).__name__
        return None if status == 200 else str(status)

    def _explained(self, seen: str) -> str:
        """What was seen instead of 200, and what to do about it."""
        if seen in ("401", "403"):
            return (
                f" refuses us with status {seen}; set host.headers, such as "
                "'host.headers.Authorization=Bearer ${oc.env:MY_TOKEN}'"
            )
        if seen.isdigit():
            return f"/health answers {seen}, expected 200; is it an OpenEnv server?"
        if "CERTIFICATE_VERIFY_FAILED" in seen:
            return (
                f": its certificate is not trusted: {seen}; set host.ca_file to the file of the "
                "authority that signed it"
            )
        if "SSL" in seen:
            return f": TLS fails: {seen}; does the server want http:// instead of https://?"
        return f" cannot be reached: {seen}; is it running, and reachable from here?"


def http_url(url: str) -> str:
    """A server's address as an http or https URL, without `/ws` at its end."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/").removesuffix("/ws")
    return urlunsplit((HTTP_SCHEMES[parts.scheme], parts.netloc, path, "", ""))


def tls_context(config: "AttachHostConfig") -> ssl.SSLContext:
    """Trust in the system's authorities and the `ca_file`, or in everybody. Raises ConfigError."""
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
