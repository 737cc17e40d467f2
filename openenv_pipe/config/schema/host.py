"""`host`: where environment servers run, and how many."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    model_validator,
)

from openenv_pipe.config.schema.base import (
    Block,
    Count,
    HeaderName,
    HeaderValue,
    NumCores,
    NumProcesses,
    NumRetries,
    Port,
    PositiveCount,
    PythonTarget,
    Seconds,
    SecondsOrZero,
    ServerUrl,
    Text,
)

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

MemLimitMb = Annotated[PositiveCount, Field(description="memory limit of a container")]
CpuLimit = Annotated[NumCores, Field(description="CPU limit of a container, in cores")]
BuildTimeout = Annotated[Seconds, Field(description="time limit of a build or a pull")]


class HostBlock(Block):
    """Base of the hosts."""

    sessions_per_server: SessionsPerServer

    @property
    def capacity(self) -> int:
        """The number of episodes that all servers play at once, as far as the keys say."""
        return self.sessions_per_server

    def for_one_session(self) -> Self:
        """Return this host with one server that has one session, and is not restarted."""
        return self.model_copy(update={"sessions_per_server": 1})


class StartedServers(HostBlock):
    """Base of the hosts that start their servers."""

    num_servers: NumServers

    def for_one_session(self) -> Self:
        changes = {"sessions_per_server": 1, "num_servers": 1, "max_restarts": 0}
        return self.model_copy(update=changes)

    @property
    def capacity(self) -> int:
        return self.num_servers * self.sessions_per_server


class ProcessHostConfig(StartedServers):
    """Servers as child processes on the loopback interface (conf/host/process.yaml)."""

    type: Literal["process"]
    port: Port | None = Field(
        description="port of the first server, the others follow; null: any free ports"
    )
    start_timeout_s: Seconds = Field(description="time limit of a server's start")
    stop_timeout_s: StopTimeout
    max_restarts: MaxRestarts


class DockerHostConfig(StartedServers):
    """Servers in containers of this machine's Docker daemon (conf/host/docker.yaml)."""

    type: Literal["docker"]
    image: str | None = Field(
        description="the image, pulled if missing; null: build env.package's Dockerfile"
    )
    dockerfile: str = Field(description="the Dockerfile's path within env.package")
    build_args: dict[str, Text] = Field(description="build arguments of the Dockerfile")
    build_timeout_s: BuildTimeout
    container_port: Port | None = Field(
        description="the port where the server listens in the container; null: `port` of the "
        "package's openenv.yaml, else the port that the image exposes"
    )
    network: Literal["none-outbound", "bridge"] = Field(
        description="none-outbound: no network; the server is reached through a unix socket; "
        "bridge: Docker's default network, with access to the outside"
    )
    mem_limit_mb: MemLimitMb
    cpus: CpuLimit
    pids_limit: PositiveCount = Field(
        description="processes and threads of a container; a session needs a thread"
    )
    tmp_mb: PositiveCount = Field(description="size of /tmp, which is held in memory")
    read_only: bool = Field(description="true: only /tmp can be written")
    gpus: Literal["all"] | list[Text] | None = Field(
        description="GPUs by the ids that nvidia-smi shows; null: none"
    )
    start_timeout_s: Seconds = Field(description="time limit of a server's start")
    stop_timeout_s: StopTimeout
    max_restarts: MaxRestarts


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

    def for_one_session(self) -> Self:
        return self.model_copy(update={"sessions_per_server": 1, "urls": self.urls[:1]})


class KubernetesHostConfig(StartedServers):
    """Servers in pods of a Kubernetes cluster, one each (conf/host/kubernetes.yaml)."""

    type: Literal["kubernetes"]
    image: str = Field(description="the image's name as the cluster's nodes pull it")
    image_pull_secrets: list[str] = Field(description="Secrets with the registry's credentials")
    container_port: Port = Field(description="the port where the server listens in the pod")
    kubeconfig: str | None = Field(
        description="null: $KUBECONFIG or ~/.kube/config; inside a cluster the pod's own account"
    )
    context: str | None = Field(description="context of the kubeconfig; null: its current one")
    namespace: str = Field(description="the namespace for pods, services and policies")
    access: Literal["port_forward", "cluster"] = Field(
        description="how servers are reached; port_forward: through the cluster's API; cluster: by "
        "services, from inside the cluster"
    )
    network: Literal["none-outbound", "open"] = Field(
        description="none-outbound: a NetworkPolicy forbids outgoing connections; open: no policy"
    )
    mem_limit_mb: PositiveCount = Field(description="memory limit of a pod")
    cpus: NumCores = Field(description="CPU limit of a pod, in cores")
    tmp_mb: PositiveCount = Field(description="size of /tmp, which is held in memory")
    read_only: bool = Field(description="true: only /tmp can be written")
    run_as_non_root: bool = Field(description="true: images that run as root are rejected")
    gpus: Count = Field(description="GPUs of each pod")
    secrets: list[str] = Field(description="Secrets whose entries become environment variables")
    pod_spec: dict[str, Any] = Field(
        description="further fields of the pods' spec, such as nodeSelector and tolerations"
    )
    start_timeout_s: Seconds = Field(
        description="time limit of a server's start, scheduling and pulling included"
    )
    stop_timeout_s: StopTimeout
    max_restarts: MaxRestarts


class PythonHostConfig(PythonTarget, HostBlock):
    """An `environments.hosts.base.Host` of your own.

    It is made by target(env, logs, sessions_per_server, **options).
    """


class NoHostConfig(HostBlock):
    """No environment: clients and Harbor play by rules of their own (conf/host/none.yaml)."""

    type: Literal["none"]


SupervisedHostConfig = ProcessHostConfig | DockerHostConfig | KubernetesHostConfig  # start servers
HostConfig = Annotated[
    ProcessHostConfig
    | DockerHostConfig
    | AttachHostConfig
    | KubernetesHostConfig
    | PythonHostConfig
    | NoHostConfig,
    Field(discriminator="type"),
]
