"""Host `kubernetes`: environment servers in pods of a cluster, one server in each pod.

All objects of a run belong to its lease, which the run renews while it lives. A run that finds an
expired lease of another run deletes it, and the cluster then deletes the objects that it owns.
Other objects are not touched. Kubernetes does not restart pods: a restart that the host does not
notice would break episodes without an error.
"""

import asyncio
import os
import secrets
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import JsonValue

from openenv_pipe.config.schema import EnvConfig
from openenv_pipe.environments.hosts.supervised import SupervisedHost
from openenv_pipe.errors import HostError
from openenv_pipe.extras.containers.kubernetes.api import (
    NOT_FOUND,
    Cluster,
    ClusterError,
    advice,
    connect,
)
from openenv_pipe.extras.containers.kubernetes.manifests import (
    LEASE_DURATION_S,
    has_expired,
    lease,
    network_policy,
    owner_reference,
    pod,
    service,
)
from openenv_pipe.extras.containers.kubernetes.pod import EnvPod
from openenv_pipe.extras.containers.schema import KubernetesHostConfig
from openenv_pipe.system.supervisor import RestartBudget

RENEW_EVERY_S = LEASE_DURATION_S / 10


class KubernetesHost(SupervisedHost):
    """A host with `config.num_servers` pods, whose logs are `log_dir`/env-0.log and so on."""

    def __init__(self, env: EnvConfig, config: KubernetesHostConfig, log_dir: Path) -> None:
        pod(env, config, name="", owner={"name": ""}, index=0)
        self._config = config
        self._run = f"openenv-pipe-{secrets.token_hex(4)}"
        self._cluster: Cluster | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._pods = [
            EnvPod(env, config, index, log_dir / f"env-{index}.log")
            for index in range(config.num_servers)
        ]
        super().__init__(
            env,
            self._pods,
            sessions_per_server=config.sessions_per_server,
            restart=RestartBudget(config.max_restarts, "host.max_restarts").restart,
        )

    def facts(self) -> dict[str, JsonValue]:
        digests = sorted({each.image_id for each in self._pods if each.image_id})
        return {"image": {"name": self._config.image, "id": ", ".join(digests)}}

    async def _prepare(self) -> None:
        """Delete objects of dead runs in the namespace, and create those that the pods need."""
        config = self._config
        self._cluster = await connect(config.namespace, config.context, config.kubeconfig)
        try:
            await delete_dead_runs(self._cluster)
            holder = f"{socket.gethostname()}/{os.getpid()}"
            created = await self._cluster.create(lease(self._run, holder, datetime.now(UTC)))
            owner = owner_reference(created)
            if config.network == "none-outbound":
                await self._cluster.create(network_policy(config, owner=owner))
            if config.access == "cluster":
                for index in range(config.num_servers):
                    await self._cluster.create(service(config, owner=owner, index=index))
        except ClusterError as error:
            more = advice(error.status, config.namespace)
            raise HostError(
                f"env {self._env.name!r}: the cluster rejects a call: {error}{more}"
            ) from error
        for each in self._pods:
            each.join(self._cluster, owner)
        self._renewal = asyncio.create_task(self._renew(self._cluster))

    async def _renew(self, cluster: Cluster) -> None:
        """Renew the lease regularly; fail the host if somebody deleted it, and so the pods."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            try:
                await cluster.renew_lease(self._run, datetime.now(UTC))
            except ClusterError as error:
                if error.status == NOT_FOUND:
                    self._pool.fail(HostError(f"the lease {self._run} of this run was deleted"))
                    return

    async def _close(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
        try:
            await super()._close()
        finally:
            if self._cluster is not None:
                with suppress(ClusterError):  # the lease expires, and a later run deletes it
                    await self._cluster.delete_lease(self._run)
                await self._cluster.close()


async def dead_runs(cluster: Cluster) -> list[str]:
    """Return the names of the runs in the namespace whose lease has expired."""
    now = datetime.now(UTC)
    return [each["metadata"]["name"] for each in await cluster.leases() if has_expired(each, now)]


async def delete_dead_runs(cluster: Cluster) -> None:
    """Delete the expired leases in the namespace, and with them the objects that they own."""
    for name in await dead_runs(cluster):
        with suppress(ClusterError):  # another run has deleted it
            await cluster.delete_lease(name)
