"""`host`: where environment servers run."""

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from openenv_pipe.config.schema.base import Block, Port, PythonTarget, ServerUrl, Text


class ProcessHostConfig(Block):
    """Servers as child processes on the loopback interface."""

    type: Literal["process"]
    num_servers: PositiveInt
    sessions_per_server: PositiveInt
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        description="of the first server; null: any free one"
    )
    start_timeout_s: PositiveFloat
    stop_timeout_s: PositiveFloat
    max_restarts: NonNegativeInt


class DockerHostConfig(Block):
    """Servers in containers of this machine's Docker daemon, one each."""

    type: Literal["docker"]
    num_servers: PositiveInt
    sessions_per_server: PositiveInt
    image: str | None = Field(
        description="pulled if it is not there; null: built from env.package's Dockerfile"
    )
    dockerfile: str = Field(description="within env.package, the folder that is built")
    build_args: dict[str, Text]
    build_timeout_s: PositiveFloat = Field(description="of a build or a pull")
    container_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        description="where the server listens; null: `port` of the package's openenv.yaml, or "
        "else the one that the image exposes"
    )
    network: Literal["none-outbound", "bridge"] = Field(
        description="none-outbound: no way out, by a socket in; bridge: Docker's own network"
    )
    mem_limit_mb: PositiveInt
    cpus: PositiveFloat
    pids_limit: PositiveInt = Field(description="processes and threads")
    tmp_mb: PositiveInt = Field(description="size of /tmp, kept in memory")
    read_only: bool = Field(description="all but /tmp")
    gpus: Literal["all"] | list[Text] | None = Field(description="ids as nvidia-smi has them")
    start_timeout_s: PositiveFloat
    stop_timeout_s: PositiveFloat
    max_restarts: NonNegativeInt


class AttachHostConfig(Block):
    """Servers that run already, here or elsewhere."""

    type: Literal["attach"]
    urls: Annotated[list[ServerUrl], Field(min_length=1)]
    sessions_per_server: PositiveInt
    headers: dict[str, str] = Field(description="of every request and every connection")
    verify_tls: bool = Field(description="false: a server may be anybody")
    ca_file: str | None = Field(description="authorities to trust beside the system's, in PEM")
    connect_timeout_s: PositiveFloat
    max_outage_s: NonNegativeFloat = Field(
        description="how long a server may be gone before the run ends"
    )

    @model_validator(mode="after")
    def _urls_differ(self) -> "AttachHostConfig":
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls names a server twice; raise sessions_per_server instead")
        return self


class KubernetesHostConfig(Block):
    """Servers in pods of a Kubernetes cluster, one each."""

    type: Literal["kubernetes"]
    num_servers: PositiveInt
    sessions_per_server: PositiveInt
    image: str = Field(description="as the cluster's nodes pull it")
    image_pull_secrets: list[str]
    container_port: Port
    kubeconfig: str | None = Field(
        description="null: $KUBECONFIG or ~/.kube/config, or inside a cluster the pod's own account"
    )
    context: str | None = Field(description="of the kubeconfig; null: its current one")
    namespace: str
    access: Literal["port_forward", "cluster"] = Field(
        description="port_forward: through the cluster's API; cluster: by services, from inside"
    )
    network: Literal["none-outbound", "open"] = Field(
        description="none-outbound: a NetworkPolicy without a way out; open: no policy"
    )
    mem_limit_mb: PositiveInt
    cpus: PositiveFloat
    tmp_mb: PositiveInt = Field(description="size of /tmp, kept in memory")
    read_only: bool = Field(description="all but /tmp")
    run_as_non_root: bool = Field(description="refuse images that run as root")
    gpus: NonNegativeInt
    secrets: list[str] = Field(description="Secrets whose entries become environment variables")
    pod_spec: dict[str, Any] = Field(
        description="further fields of the pods' spec, such as nodeSelector and tolerations"
    )
    start_timeout_s: PositiveFloat = Field(description="scheduling and pulling included")
    stop_timeout_s: PositiveFloat
    max_restarts: NonNegativeInt


class PythonHostConfig(PythonTarget):
    """An `environments.hosts.base.Host` of your own.

    It is made by target(env, logs, sessions_per_server, **options).
    """

    sessions_per_server: PositiveInt = Field(description="that a server of it allows")


HostConfig = Annotated[
    ProcessHostConfig
    | DockerHostConfig
    | AttachHostConfig
    | KubernetesHostConfig
    | PythonHostConfig,
    Field(discriminator="type"),
]
