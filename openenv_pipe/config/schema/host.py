"""`host`: where environment servers run, and how many."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    model_validator,
)

from openenv_pipe.config.schema.base import (
    Block,
    HeaderName,
    HeaderValue,
    NumProcesses,
    NumRetries,
    Port,
    PythonTarget,
    Seconds,
    SecondsOrZero,
    ServerUrl,
)
from openenv_pipe.config.schema.registered import Registered

NumServers = Annotated[NumProcesses, Field(description="environment servers to start")]
SessionsPerServer = Annotated[
    int,
    Field(
        ge=1,
        le=10_000,
        description="episodes that one server runs at once; the server must allow this many",
    ),
]
StopTimeout = Annotated[Seconds, Field(description="time between SIGTERM and SIGKILL")]
MaxRestarts = Annotated[
    NumRetries,
    Field(description="how often each server may be restarted before the run fails"),
]


class HostBlock(Block):
    """Base of the hosts."""

    type: str
    sessions_per_server: SessionsPerServer
    has_environment: ClassVar[bool] = True
    starts_servers: ClassVar[bool] = False
    runs_on_nodes: ClassVar[bool] = False  # rollout workers can start servers on their own nodes

    @property
    def capacity(self) -> int:
        """The number of episodes that all servers play at once, as far as the keys say."""
        return self.sessions_per_server

    @property
    def fixed_ports(self) -> Sequence[int]:
        """The ports of this machine that the servers get, if the configuration names them."""
        return ()

    @property
    def servers(self) -> dict[str, Any]:
        """The keys that name the servers or what starts them, and their values.

        A host that starts them from `env` has none.
        """
        return {}

    def for_one_session(self) -> Self:
        """Return the host with one server for one session, which is not restarted."""
        return self.model_copy(update={"sessions_per_server": 1})


class StartedServers(HostBlock):
    """Base of the hosts that start their servers."""

    num_servers: NumServers
    stop_timeout_s: StopTimeout
    max_restarts: MaxRestarts
    starts_servers: ClassVar[bool] = True

    @property
    def capacity(self) -> int:
        return self.num_servers * self.sessions_per_server

    def for_one_session(self) -> Self:
        changes = {"sessions_per_server": 1, "num_servers": 1, "max_restarts": 0}
        return self.model_copy(update=changes)


class ProcessHostConfig(StartedServers):
    """Servers as child processes on the loopback interface (conf/host/process.yaml)."""

    type: Literal["process"]
    port: Port | None = Field(
        description="port of the first server, the others follow; null: any free ports"
    )
    start_timeout_s: Seconds = Field(description="time limit of a server's start")
    runs_on_nodes: ClassVar[bool] = True

    @property
    def fixed_ports(self) -> Sequence[int]:
        return () if self.port is None else range(self.port, self.port + self.num_servers)


class AttachHostConfig(HostBlock):
    """Servers that run already, on this machine or elsewhere (conf/host/attach.yaml)."""

    type: Literal["attach"]
    urls: Annotated[list[ServerUrl], Field(min_length=1)] = Field(
        description="http(s) or ws(s) URLs of the servers"
    )
    headers: dict[HeaderName, HeaderValue] = Field(
        description="HTTP headers of every request and connection, such as Authorization"
    )
    verify_tls: bool = Field(
        description="check the servers' certificates; false: anyone can pose as the server"
    )
    ca_file: str | None = Field(
        description="PEM file of authorities to trust beside the system's; null: none"
    )
    connect_timeout_s: Seconds = Field(description="time limit of opening a connection")
    max_outage_s: SecondsOrZero = Field(
        description="how long a server may be unreachable before the run fails"
    )

    @model_validator(mode="after")
    def _urls_differ(self) -> "AttachHostConfig":
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls names a server twice; raise sessions_per_server instead")
        return self

    @property
    def capacity(self) -> int:
        return len(self.urls) * self.sessions_per_server

    @property
    def servers(self) -> dict[str, Any]:
        return {"urls": self.urls}

    def for_one_session(self) -> Self:
        return self.model_copy(update={"sessions_per_server": 1, "urls": self.urls[:1]})


class PythonHostConfig(PythonTarget, HostBlock):
    """An `environments.hosts.base.Host` of your own.

    It is made by target(env, logs, sessions_per_server, **options).
    """

    type: Literal["python"]
    runs_on_nodes: ClassVar[bool] = True


HostConfig = Annotated[HostBlock, Registered("host")]
