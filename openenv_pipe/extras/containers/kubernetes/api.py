"""The calls to a cluster's API that a host needs. Only this module imports the Kubernetes client.

Answers are read as plain JSON, because the client's models reject fields that are newer than they
are. Every call has a time limit. No call waits for a state or is retried.
"""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from kubernetes.aio import client, config
from kubernetes.aio.config import ConfigException
from kubernetes.aio.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION, refresh_token
from kubernetes.aio.stream import WsApiClient

from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.containers.kubernetes.manifests import MANAGED_BY, RUN, Manifest, renewal

CALL_LIMIT_S = 15.0
LOG_LIMIT_S = 4 * 3600.0  # a kubelet ends idle streams by then; the reader opens another
REFRESH_EVERY_S = 60.0  # looks whether the token of a kubeconfig's login program has to be renewed
NOT_FOUND = 404

_log = logging.getLogger(__name__)


class ClusterError(Exception):
    """The API rejected a call (`status`) or did not answer (`status` 0)."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}" if status else text)
        self.status = status


def advice(status: int, namespace: str) -> str:
    """Return what to do about calls that end with this status, as the end of a message."""
    known = {
        0: "check that the cluster is reachable and that host.context names the right one",
        401: "log in to the cluster again",
        403: "docs/kubernetes.md lists what the account must be allowed to do in namespace "
        f"{namespace}",
        NOT_FOUND: f"set host.namespace if there is no namespace {namespace}",
    }
    return f"; {known[status]}" if status in known else ""


class Cluster:
    def __init__(
        self, configuration: client.Configuration, namespace: str, login: Any = None
    ) -> None:
        """login: the kubeconfig's loader, whose tokens may expire; None: nothing is renewed."""
        configuration.connection_pool_maxsize = 0  # every session has a connection of its own
        self.namespace = namespace
        self._renewal = asyncio.create_task(_renew_token(login, configuration)) if login else None
        self._api = client.ApiClient(configuration)
        self._tunnel_api = WsApiClient(configuration)
        self._core = client.CoreV1Api(self._api)
        self._leases = client.CoordinationV1Api(self._api)
        self._creators = {
            "Lease": self._leases.create_namespaced_lease_without_preload_content,
            "NetworkPolicy": client.NetworkingV1Api(
                self._api
            ).create_namespaced_network_policy_without_preload_content,
            "Pod": self._core.create_namespaced_pod_without_preload_content,
            "Service": self._core.create_namespaced_service_without_preload_content,
        }

    async def close(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
        await self._api.close()
        await self._tunnel_api.close()

    async def create(self, manifest: Manifest) -> Mapping[str, Any]:
        """Create an object. Unknown fields are an error. Raises ClusterError, as all calls do."""
        create = self._creators[manifest["kind"]]
        return await self._call(create, body=manifest, field_validation="Strict")

    async def read_pod(self, name: str) -> Mapping[str, Any]:
        return await self._call(self._core.read_namespaced_pod_without_preload_content, name=name)

    async def delete_pod(self, name: str) -> None:
        await self._call(self._core.delete_namespaced_pod_without_preload_content, name=name)

    async def leases(self) -> list[Mapping[str, Any]]:
        selector = ",".join(f"{name}={value}" for name, value in MANAGED_BY.items())
        listed = await self._call(
            self._leases.list_namespaced_lease_without_preload_content,
            label_selector=f"{selector},{RUN}",
        )
        return listed["items"]

    async def renew_lease(self, name: str, now: datetime) -> None:
        await self._call(
            self._leases.patch_namespaced_lease_without_preload_content,
            name=name,
            body={"spec": renewal(now)},
        )

    async def delete_lease(self, name: str) -> None:
        """Delete a lease. The cluster then deletes the objects that the lease owns."""
        await self._call(
            self._leases.delete_namespaced_lease_without_preload_content,
            name=name,
            propagation_policy="Background",
        )

    async def log(self, pod: str, since_s: int | None) -> AsyncIterator[bytes]:
        """Yield the log of a pod's container until the container ends.

        since_s: begin with what was written this many seconds ago; None: with the whole log.
        """
        with cluster_errors():
            response = await self._core.read_namespaced_pod_log_without_preload_content(
                name=pod,
                namespace=self.namespace,
                follow=True,
                since_seconds=since_s,
                _request_timeout=LOG_LIMIT_S,
            )
            async with response:
                if response.status >= 400:
                    raise ClusterError(response.status, (await response.text())[:200])
                async for chunk in response.content.iter_any():
                    yield chunk

    @asynccontextmanager
    async def port_forward(
        self, pod: str, port: int
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a WebSocket that transports one connection to a port of the pod."""
        core = client.CoreV1Api(self._tunnel_api)
        opening = await core.connect_get_namespaced_pod_portforward_without_preload_content(
            name=pod, namespace=self.namespace, ports=str(port), _request_timeout=CALL_LIMIT_S
        )
        async with opening as websocket:
            yield websocket

    async def _call(self, function: Any, **arguments: Any) -> Mapping[str, Any]:
        with cluster_errors():
            response = await function(
                namespace=self.namespace, _request_timeout=CALL_LIMIT_S, **arguments
            )
            async with response:
                status, text = response.status, await response.text()
            answer = json.loads(text)
        if status >= 400:
            raise ClusterError(status, str(answer.get("message", text))[:500])
        return answer


@contextmanager
def cluster_errors() -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientError, OSError, ValueError) as error:
        text = str(error) or f"no answer within {CALL_LIMIT_S:g} s"
        raise ClusterError(0, f"{type(error).__name__}: {text}") from error


async def connect(namespace: str, context: str | None, kubeconfig: str | None = None) -> Cluster:
    """Return the cluster that the kubeconfig names, or the one that this process runs in.

    context: of the kubeconfig; None: its current one.

    No call is made yet. Raises ConfigError: there is no usable kubeconfig.
    """
    configuration, login = client.Configuration(), None
    path = kubeconfig or KUBE_CONFIG_DEFAULT_LOCATION
    try:
        inside = "KUBERNETES_SERVICE_HOST" in os.environ
        if inside and kubeconfig is None and not Path(path).expanduser().exists():
            config.load_incluster_config(client_configuration=configuration)
        else:
            login = await config.load_kube_config(
                path, context, configuration, persist_config=False
            )
    except (ConfigException, OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the kubeconfig names no usable cluster: {error}; set host.kubeconfig and "
            "host.context, as `kubectl config get-contexts` shows them"
        ) from error
    return Cluster(configuration, namespace, login)


async def _renew_token(login: Any, configuration: client.Configuration) -> None:
    """Renew the token of a kubeconfig's login program, if it has one, before it expires."""
    while True:
        try:
            await refresh_token(login, configuration, REFRESH_EVERY_S)
        except Exception as error:  # of the program: the old token may still be good
            _log.warning("the token of the kubeconfig cannot be renewed: %s", error)
            await asyncio.sleep(REFRESH_EVERY_S)
        else:  # no token of this kubeconfig can be renewed
            return
