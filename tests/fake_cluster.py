"""A fake of a Kubernetes cluster's API, with the calls that the host makes. Pods are processes.

Created objects are validated by the models of the official client, which reject unknown fields. The
fake does not schedule pods, pull images, or enforce limits and policies.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import uvicorn
from kubernetes.client import V1Lease, V1NetworkPolicy, V1Pod, V1Service
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from tests.ports import lasting_port

CORE, LEASES = (
    "/api/v1/namespaces/{namespace}",
    "/apis/coordination.k8s.io/v1/namespaces/{namespace}",
)
POLICIES = "/apis/networking.k8s.io/v1/namespaces/{namespace}"
MODELS = {"Lease": V1Lease, "NetworkPolicy": V1NetworkPolicy, "Pod": V1Pod, "Service": V1Service}
TOKEN = "a-token-of-the-tests"


class FakePod:
    """A pod whose container is a process on the loopback interface, whatever its image."""

    def __init__(self, manifest: dict[str, Any], command: list[str], *, ready: bool) -> None:
        self.manifest = manifest
        self.port = lasting_port()
        self.log = bytearray()
        self.ready = ready
        self._command = [part.replace("{port}", str(self.port)) for part in command]
        self._process: asyncio.subprocess.Process | None = None
        self.life = asyncio.create_task(self._live())

    async def _live(self) -> None:
        (container,) = self.manifest["spec"]["containers"]
        variables = {each["name"]: each["value"] for each in container["env"]}
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            env={"PATH": os.environ["PATH"], **variables},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        probe = asyncio.create_task(self._probe())
        while data := await self._process.stdout.read(1024):
            self.log += data
        await self._process.wait()
        probe.cancel()

    async def _probe(self) -> None:
        while not self.ready:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                self.ready = True
            await asyncio.sleep(0.02)

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    def as_read(self) -> dict[str, Any]:
        state: dict[str, Any] = {"running": {}}
        if self.ended:
            state = {"terminated": {"exitCode": self._process.returncode, "reason": "Error"}}
        ready = str(self.ready and not self.ended)
        return self.manifest | {
            "status": {
                "phase": "Failed" if self.ended else "Running",
                "conditions": [{"type": "Ready", "status": ready}],
                "containerStatuses": [{"imageID": "image@sha256:12", "state": state}],
                "newerThanTheClient": True,
            }
        }

    async def end(self) -> None:
        while self._process is None and not self.life.done():
            await asyncio.sleep(0.01)
        if not self.life.done() and not self.ended:
            self._process.kill()
        await self.life


class FakeCluster:
    """Created objects by kind and name, and the names of deleted ones."""

    def __init__(self, command: list[str]) -> None:
        self.objects: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in MODELS}
        self.pods: dict[str, FakePod] = {}
        self.deleted: list[str] = []
        self.reject: int | None = None  # the HTTP status of the answer to every creation
        self.ready_at_once = False  # pods pass their readiness probe before they listen
        self._command = command

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve the API and yield its URL."""
        port = lasting_port()
        settings = uvicorn.Config(
            self._app(), port=port, log_level="error", ws="websockets-sansio", lifespan="off"
        )
        server = uvicorn.Server(settings)
        server.install_signal_handlers = lambda: None
        task = asyncio.create_task(server._serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            for pod in self.pods.values():
                await pod.end()
            server.should_exit = server.force_exit = True
            await task

    def _app(self) -> Starlette:
        routes = [
            Route(f"{CORE}/pods", self.create, methods=["POST"]),
            Route(f"{CORE}/services", self.create, methods=["POST"]),
            Route(f"{POLICIES}/networkpolicies", self.create, methods=["POST"]),
            Route(f"{LEASES}/leases", self.create, methods=["POST"]),
            Route(f"{LEASES}/leases", self.list_leases),
            Route(f"{LEASES}/leases/{{name}}", self.renew, methods=["PATCH"]),
            Route(f"{LEASES}/leases/{{name}}", self.delete_lease, methods=["DELETE"]),
            Route(f"{CORE}/pods/{{name}}", self.read_pod),
            Route(f"{CORE}/pods/{{name}}", self.delete_pod, methods=["DELETE"]),
            Route(f"{CORE}/pods/{{name}}/log", self.log),
            WebSocketRoute(f"{CORE}/pods/{{name}}/portforward", self.port_forward),
        ]
        return Starlette(routes=routes)

    async def create(self, request: Request) -> JSONResponse:
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        assert request.query_params["fieldValidation"] == "Strict"
        if self.reject is not None:
            return JSONResponse({"message": "pods is forbidden"}, self.reject)
        manifest = await request.json()
        MODELS[manifest["kind"]].model_validate(manifest)
        name = manifest["metadata"]["name"]
        manifest["metadata"]["uid"] = f"uid-of-{name}"
        self.objects[manifest["kind"]][name] = manifest
        if manifest["kind"] == "Pod":
            self.pods[name] = FakePod(manifest, self._command, ready=self.ready_at_once)
        return JSONResponse(manifest, 201)

    async def list_leases(self, request: Request) -> JSONResponse:
        assert "managed-by=openenv-pipe" in request.query_params["labelSelector"]
        return JSONResponse({"items": list(self.objects["Lease"].values())})

    async def renew(self, request: Request) -> JSONResponse:
        stored = self.objects["Lease"].get(request.path_params["name"])
        if stored is None:
            return JSONResponse({"message": "not found"}, 404)
        stored["spec"] |= (await request.json())["spec"]
        return JSONResponse(stored)

    async def delete_lease(self, request: Request) -> JSONResponse:
        name = request.path_params["name"]
        self.deleted.append(name)
        del self.objects["Lease"][name]
        for kind, objects in self.objects.items():
            owned = [key for key, each in objects.items() if is_owned(each, f"uid-of-{name}")]
            for key in owned:
                await self._remove(kind, key)
        return JSONResponse({})

    async def read_pod(self, request: Request) -> JSONResponse:
        pod = self.pods.get(request.path_params["name"])
        if pod is None:
            return JSONResponse({"message": "pods not found"}, 404)
        return JSONResponse(pod.as_read())

    async def delete_pod(self, request: Request) -> JSONResponse:
        await self._remove("Pod", request.path_params["name"])
        return JSONResponse({})

    async def log(self, request: Request) -> StreamingResponse:
        pod = self.pods[request.path_params["name"]]

        async def stream() -> AsyncIterator[bytes]:
            sent = 0
            while True:
                done = pod.life.done()
                yield bytes(pod.log[sent:])
                sent = len(pod.log)
                if done:
                    return
                await asyncio.sleep(0.02)

        return StreamingResponse(stream())

    async def port_forward(self, websocket: WebSocket) -> None:
        """Forward a port over a WebSocket with the protocol v4.channel.k8s.io, as the kubelet
        does."""
        assert websocket.headers["authorization"] == f"Bearer {TOKEN}"
        await websocket.accept(subprotocol="v4.channel.k8s.io")
        port = int(websocket.query_params["ports"]).to_bytes(2, "little")
        for channel in (b"\x00", b"\x01"):
            await websocket.send_bytes(channel + port)
        pod = self.pods[websocket.path_params["name"]]
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", pod.port)
        except OSError as error:
            with contextlib.suppress(WebSocketDisconnect):
                await websocket.send_bytes(b"\x01" + str(error).encode())
                await websocket.close()
            return
        outward = asyncio.create_task(carry_out(reader, websocket))
        try:
            while True:
                message = await websocket.receive_bytes()
                assert message[0] == 0
                writer.write(message[1:])
                await writer.drain()
        except (WebSocketDisconnect, OSError, RuntimeError):
            pass
        finally:
            outward.cancel()
            writer.close()

    async def _remove(self, kind: str, name: str) -> None:
        self.objects[kind].pop(name, None)
        pod = self.pods.pop(name, None) if kind == "Pod" else None
        if pod is not None:
            await pod.end()


async def carry_out(reader: asyncio.StreamReader, websocket: WebSocket) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        while data := await reader.read(32 * 1024):
            await websocket.send_bytes(b"\x00" + data)
        await websocket.close()


def is_owned(manifest: dict[str, Any], uid: str) -> bool:
    owners = manifest["metadata"].get("ownerReferences", [])
    return any(owner["uid"] == uid for owner in owners)


def kubeconfig(url: str) -> dict[str, Any]:
    """Return a kubeconfig for the fake."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {"server": url}}],
        "users": [{"name": "tester", "user": {"token": TOKEN}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "tester"}}],
    }


def old_lease(name: str) -> dict[str, Any]:
    """Return the lease of a run that died long ago."""
    then = datetime(2020, 1, 1, tzinfo=UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "uid": f"uid-of-{name}"},
        "spec": {"leaseDurationSeconds": 300, "renewTime": then},
    }
