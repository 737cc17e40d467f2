"""Manifests of the objects that are created in a cluster. Pure functions, without any calls.

Pods get no privileges, no capabilities, no service account token, and are not restarted by
Kubernetes. Fields of `host.pod_spec` that would change this are refused.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from openenv_pipe.environments.hosts.process import filled_in, server_environment
from openenv_pipe.errors import ConfigError

if TYPE_CHECKING:
    from openenv_pipe.config.schema import EnvConfig, KubernetesHostConfig

Manifest = dict[str, Any]

CONTAINER = "env"
MANAGED_BY = {"app.kubernetes.io/managed-by": "openenv-pipe"}
RUN = "openenv-pipe/run"  # label: the name of the run's lease
SERVER = "openenv-pipe/server"  # label: the number of the server in the run
LEASE_DURATION_S = 300  # a run that has not renewed its lease for so long is dead


def lease(run: str, holder: str, now: datetime) -> Manifest:
    """The object that owns all others of a run, and says that the run is alive."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": run, "labels": labels(run)},
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": LEASE_DURATION_S,
            **renewal(now),
        },
    }


def renewal(now: datetime) -> Manifest:
    """The part of a lease's spec that is written again and again."""
    return {"renewTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}


def has_expired(lease_as_read: Mapping[str, Any], now: datetime) -> bool:
    """True for the lease of a run that died without giving it back."""
    spec = lease_as_read["spec"]
    renewed = datetime.fromisoformat(spec["renewTime"])
    return (now - renewed).total_seconds() > spec["leaseDurationSeconds"]


def pod(
    env: "EnvConfig", config: "KubernetesHostConfig", *, name: str, owner: Manifest, index: int
) -> Manifest:
    """One environment server. owner: see `owner_reference`. Raises ConfigError."""
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": max(1, round(config.stop_timeout_s)),
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "imagePullSecrets": [{"name": secret} for secret in config.image_pull_secrets],
        "containers": [container(env, config)],
        "volumes": [
            {
                "name": "tmp",
                "emptyDir": {"medium": "Memory", "sizeLimit": f"{config.tmp_mb}Mi"},
            }
        ],
    }
    if taken := sorted(set(spec) & set(config.pod_spec)):
        raise ConfigError(
            f"host.pod_spec sets {', '.join(taken)}, which openenv-pipe sets itself; it is for "
            "fields such as nodeSelector, tolerations and runtimeClassName"
        )
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": labels(owner["name"], index),
            "ownerReferences": [owner],
        },
        "spec": spec | config.pod_spec,
    }


def container(env: "EnvConfig", config: "KubernetesHostConfig") -> Manifest:
    """The server's container and its limits. Requests are the limits: nothing is overcommitted."""
    limits = {"memory": f"{config.mem_limit_mb}Mi", "cpu": f"{round(config.cpus * 1000)}m"}
    if config.gpus:
        limits["nvidia.com/gpu"] = str(config.gpus)
    variables = server_environment({}, env.variables, config.sessions_per_server)
    values = {"{port}": str(config.container_port), "{host}": "0.0.0.0"}
    health = {"path": "/health", "port": config.container_port}
    manifest: Manifest = {
        "name": CONTAINER,
        "image": config.image,
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "envFrom": [{"secretRef": {"name": secret}} for secret in config.secrets],
        "ports": [{"containerPort": config.container_port}],
        "readinessProbe": {"httpGet": health, "periodSeconds": 2, "timeoutSeconds": 5},
        "resources": {"limits": limits, "requests": dict(limits)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": config.read_only,
            "runAsNonRoot": config.run_as_non_root,
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    if env.command:
        manifest["command"] = [filled_in(part, values) for part in env.command]
    return manifest


def service(config: "KubernetesHostConfig", *, owner: Manifest, index: int) -> Manifest:
    """The address of one server inside the cluster. It outlives the pods that stand behind it."""
    run = owner["name"]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": f"{run}-{index}",
            "labels": labels(run, index),
            "ownerReferences": [owner],
        },
        "spec": {
            "selector": labels(run, index),
            "ports": [{"port": config.container_port, "targetPort": config.container_port}],
        },
    }


def network_policy(config: "KubernetesHostConfig", *, owner: Manifest) -> Manifest:
    """No way out for the pods of a run, and one way in. A cluster may lack what enforces it."""
    run = owner["name"]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": run, "labels": labels(run), "ownerReferences": [owner]},
        "spec": {
            "podSelector": {"matchLabels": labels(run)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"ports": [{"protocol": "TCP", "port": config.container_port}]}],
            "egress": [],
        },
    }


def labels(run: str, index: int | None = None) -> dict[str, str]:
    """What the objects of a run carry; with an index, those of one server."""
    which = {} if index is None else {SERVER: str(index)}
    return {**MANAGED_BY, RUN: run, **which}


def owner_reference(created_lease: Mapping[str, Any]) -> Manifest:
    """Makes the cluster remove an object when the run's lease is removed."""
    return {
        "apiVersion": created_lease["apiVersion"],
        "kind": created_lease["kind"],
        "name": created_lease["metadata"]["name"],
        "uid": created_lease["metadata"]["uid"],
    }


def trouble(pod_as_read: Mapping[str, Any]) -> tuple[str | None, str]:
    """Why a pod is dead, or will never start, in words (None: it is not); and what it is up to."""
    status = pod_as_read.get("status", {})
    phase = status.get("phase", "Unknown")
    states = [each.get("state", {}) for each in status.get("containerStatuses", [])]
    for state in states:
        if ended := state.get("terminated"):
            return f"exit code {ended.get('exitCode')}, {ended.get('reason', 'no reason')}", phase
        waiting = state.get("waiting", {})
        seen = f"{waiting.get('reason')}: {waiting.get('message', '')}".strip(": ")
        if waiting.get("reason") in NEVER_STARTS:
            return seen, phase
        if waiting:
            phase = f"{phase} ({seen})"
    if phase in ("Failed", "Succeeded"):
        return f"{phase}, {status.get('reason', '')} {status.get('message', '')}".strip(), phase
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            phase = f"{phase} ({condition.get('reason')}: {condition.get('message')})"
    return None, phase


# ErrImagePull is not among them: it may be the network, and is tried again for a while.
NEVER_STARTS = (
    *("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
)
