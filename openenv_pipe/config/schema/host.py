"""`host`: where environment servers run, and how many."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from openenv_pipe.config.schema.base import (
    Block,
    NumProcesses,
    NumRetries,
    Port,
    PythonTarget,
    Seconds,
)
from openenv_pipe.config.schema.registered import Registered


class HostBlock(Block):
    """Base of the hosts."""

    type: str
    sessions_per_server: Annotated[int, Field(ge=1, le=10_000)] = Field(
        description="episodes that one server runs at once; the server must allow this many"
    )
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

    num_servers: NumProcesses = Field(description="environment servers to start")
    stop_timeout_s: Seconds = Field(description="time between SIGTERM and SIGKILL")
    max_restarts: NumRetries = Field(
        description="how often each server may be restarted before the run fails"
    )
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
        description="port of the first server; the others get the next ones; null: any free ports"
    )
    start_timeout_s: Seconds = Field(description="time limit of a server's start")
    runs_on_nodes: ClassVar[bool] = True

    @property
    def fixed_ports(self) -> Sequence[int]:
        return () if self.port is None else range(self.port, self.port + self.num_servers)


class PythonHostConfig(PythonTarget, HostBlock):
    """An `environments.hosts.base.Host` of your own.

    It is made by target(env, logs, sessions_per_server, **options).
    """

    type: Literal["python"]
    runs_on_nodes: ClassVar[bool] = True


HostConfig = Annotated[HostBlock, Registered("host")]
