"""The keys of hosts and sandboxes that are containers."""

from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from openenv_pipe.config.schema.agent import SandboxBlock
from openenv_pipe.config.schema.base import Count, NumCores, Port, PositiveCount, Seconds, Text
from openenv_pipe.config.schema.host import StartedServers

MemLimitMb = Annotated[PositiveCount, Field(description="memory limit of a container")]
CpuLimit = Annotated[NumCores, Field(description="CPU limit of a container, in cores")]
BuildTimeout = Annotated[Seconds, Field(description="time limit of a build or a pull")]


def _absolute(path: str) -> str:
    if not PurePosixPath(path).is_absolute():
        raise ValueError(f"{path!r} is not an absolute path; begin it with /")
    return path


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

    @property
    def servers(self) -> dict[str, Any]:
        port = {"container_port": self.container_port} if self.container_port else {}
        return {"image": self.image, **port} if self.image else {}


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

    @property
    def servers(self) -> dict[str, Any]:
        return {"image": self.image, "container_port": self.container_port}


class DockerSandboxConfig(SandboxBlock):
    """Programs in containers that reach the model and their session, and nothing else
    (conf/agent/sandbox/docker.yaml)."""

    type: Literal["docker"]
    image: str = Field(
        description="the image that has the program, python3 and sh; it is pulled if missing"
    )
    mounts: dict[Annotated[str, AfterValidator(_absolute)], Text] = Field(
        description="files and folders of this machine that programs may read, by path in the "
        "container, such as {/agent.py: my_agent.py}"
    )
    build_timeout_s: BuildTimeout
    mem_limit_mb: MemLimitMb
    cpus: CpuLimit
    pids_limit: PositiveCount = Field(description="processes and threads of a container")
    tmp_mb: PositiveCount = Field(
        description="size of the program's folder, and of /tmp; both are held in memory"
    )
    read_only: bool = Field(description="true: only the program's folder and /tmp can be written")
