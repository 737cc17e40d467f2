"""Manifests of the objects that a host creates in a cluster. These functions make no calls.

Pods get no privileges, no capabilities and no service account token, and Kubernetes does not
restart them. Fields of `host.pod_spec` that would change this are rejected.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.environments.hosts.process import filled_in, server_variables
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.containers.schema import KubernetesHostConfig

Manifest = dict[str, Any]

CONTAINER = "env"
MANAGED_BY = {"app.kubernetes.io/managed-by": "openenv-pipe"}
RUN = "openenv-pipe/run"  # label: the name of the run's lease
SERVER = "openenv-pipe/server"  # label: the number of the server in the run
LEASE_DURATION_S = 300  # a run that has not renewed its lease for so long is dead
NODE_LOST = "NodeLost"  # the reason in the status of a pod whose node does not answer


def lease(run: str, holder: str, now: datetime) -> Manifest:
    """Return the manifest of a run's lease, which owns the run's other objects.

    holder: who runs it, as host name and process id, for people who look at the cluster.
    """
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
    """Return the part of a lease's spec that each renewal writes."""
    return {"renewTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}


def has_expired(lease_as_read: Mapping[str, Any], now: datetime) -> bool:
    """Return whether a lease was not renewed in time, because its run has died."""
    spec = lease_as_read["spec"]
    renewed = datetime.fromisoformat(spec["renewTime"])
    return (now - renewed).total_seconds() > spec["leaseDurationSeconds"]


def pod(
    env: EnvConfig, config: KubernetesHostConfig, *, name: str, owner: Manifest, index: int
) -> Manifest:
    """Return the manifest of a pod with one environment server.

    owner: see `owner_reference`. Raises ConfigError.
    """
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": max(1, round(config.stop_timeout_s)),
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "imagePullSecrets": [{"name": secret} for secret in config.image_pull_secrets],
        "containers": [container(env, config)],
        "volumes": [
            {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": f"{config.tmp_mb}Mi"}}
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


def container(env: EnvConfig, config: KubernetesHostConfig) -> Manifest:
    """Return a pod's container. It requests as much as its limits, so no node is overcommitted."""
    limits = {"memory": f"{config.mem_limit_mb}Mi", "cpu": f"{round(config.cpus * 1000)}m"}
    if config.gpus:
        limits["nvidia.com/gpu"] = str(config.gpus)
    variables = server_variables(env, config.sessions_per_server)
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


def service(config: KubernetesHostConfig, *, owner: Manifest, index: int) -> Manifest:
    """Return the service of a server: its address in the cluster, whichever pod it runs in."""
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


def network_policy(config: KubernetesHostConfig, *, owner: Manifest) -> Manifest:
    """Return a policy that forbids a run's pods all connections except incoming ones to the port.

    A cluster without a network plugin for policies does not enforce it.
    """
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
    """Return the labels of a run's objects; with an index, of those of one server."""
    server = {} if index is None else {SERVER: str(index)}
    return {**MANAGED_BY, RUN: run, **server}


def owner_reference(created_lease: Mapping[str, Any]) -> Manifest:
    """Return the reference in an object that lets the cluster delete it with the run's lease."""
    return {
        "apiVersion": created_lease["apiVersion"],
        "kind": created_lease["kind"],
        "name": created_lease["metadata"]["name"],
        "uid": created_lease["metadata"]["uid"],
    }


def trouble(pod_as_read: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return why a pod is dead or will never start (None: neither), and its present state."""
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
    # A node that is lost reports no end of its containers.
    if status.get("reason") == NODE_LOST:
        return f"{NODE_LOST}: {status.get('message', '')}".strip(": "), phase
    ends = pod_as_read.get("metadata", {}).get("deletionTimestamp")  # its grace period included
    if ends is not None and datetime.fromisoformat(ends) < datetime.now(UTC):
        return f"the pod was deleted, and has not reported an end until {ends}", phase
    if phase in ("Failed", "Succeeded"):
        return f"{phase}, {status.get('reason', '')} {status.get('message', '')}".strip(), phase
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            phase = f"{phase} ({condition.get('reason')}: {condition.get('message')})"
    return None, phase


# ErrImagePull is not among these reasons: the network may be the cause, and Kubernetes tries again.
NEVER_STARTS = (
    *("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
)
