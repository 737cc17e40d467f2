"""`KubernetesHost` with the official client, against a fake of the cluster's API.

No test here ran on a real cluster; docs/kubernetes.md says what therefore is untested.
"""

import asyncio
import sys
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
import yaml

from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError, HostError, SessionClosedError

pytest.importorskip("kubernetes.aio")

from openenv_pipe.environments.build import build_host
from openenv_pipe.extras.containers.kubernetes import api as kubernetes_api
from openenv_pipe.extras.containers.kubernetes import host as kubernetes_host
from openenv_pipe.extras.containers.kubernetes import pod as kubernetes_pod
from openenv_pipe.extras.containers.kubernetes.api import ClusterError
from openenv_pipe.extras.containers.kubernetes.host import KubernetesHost
from openenv_pipe.extras.containers.kubernetes.manifests import has_expired, pod, trouble
from openenv_pipe.extras.containers.prune import prune
from tests.fake_cluster import FakeCluster, kubeconfig, old_lease
from tests.integration.test_process_host import LIMIT_S, STUB, within
from tests.stub_server import started, stub_command


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(kubernetes_pod, "POLL_S", 0.05)
    monkeypatch.setattr(kubernetes_host, "RENEW_EVERY_S", 0.05)


def settings(**changes):
    """Return the env and host configurations. The fake ignores the image and runs a command."""
    given = [f"host.{name}={value}" for name, value in changes.items()]
    config = compose(["conf=echo", "host=kubernetes", "host.image=registry.example/x:1", *given])
    return config.config.env, config.config.host


@asynccontextmanager
async def running(tmp_path, mood="fine", **changes):
    """A running cluster and a host that has started in it."""
    cluster = FakeCluster(stub_command(STUB, mood))
    async with cluster.serving() as url:
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(kubeconfig(url)))
        env, config = settings(kubeconfig=path, sessions_per_server=2, **changes)
        async with started(KubernetesHost(env, config, tmp_path)) as host:
            yield SimpleNamespace(cluster=cluster, host=host, config=config)
    assert not any(cluster.objects.values())


PAST = "2020-01-01T00:00:00Z"
RUNNING = {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}


async def die(host):
    async with host.session() as session:
        with pytest.raises(SessionClosedError):
            await session.step({"message": "die"}, LIMIT_S)


# --- manifests ---------------------------------------------------------------------------------


def test_a_pod_may_do_nothing_that_it_need_not():
    from kubernetes.client import V1Pod

    env, config = settings(
        gpus=1, image_pull_secrets="[pull]", secrets="[keys]", pod_spec="{nodeSelector: {a: b}}"
    )
    manifest = pod(env, config, name="x", owner={"name": "run"}, index=3)
    with pytest.raises(ValueError, match="uid"):
        V1Pod.model_validate(manifest)  # the client's models reject unknown fields
    manifest["metadata"]["ownerReferences"] = []
    V1Pod.model_validate(manifest)
    spec = manifest["spec"]
    assert (spec["restartPolicy"], spec["automountServiceAccountToken"]) == ("Never", False)
    assert spec["nodeSelector"] == {"a": "b"}
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": False,
    }
    limits = {"memory": "2048Mi", "cpu": "2000m", "nvidia.com/gpu": "1"}
    assert container["resources"] == {"limits": limits, "requests": limits}
    assert {"name": "MAX_CONCURRENT_ENVS", "value": "64"} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]


def test_a_pod_spec_that_would_replace_ours_is_rejected(tmp_path):
    env, config = settings(pod_spec="{restartPolicy: Always}")
    with pytest.raises(ConfigError, match=r"host\.pod_spec sets restartPolicy"):
        KubernetesHost(env, config, tmp_path)


@pytest.mark.parametrize(
    ("status", "cause", "doing"),
    [
        ({"phase": "Running"}, None, "Running"),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
            "ImagePullBackOff",
            "",
        ),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]},
            None,
            "ErrImagePull",
        ),
        (
            {
                "containerStatuses": [
                    {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
                ]
            },
            "exit code 137, OOMKilled",
            "",
        ),
        ({"phase": "Failed", "reason": "Evicted"}, "Failed, Evicted", ""),
        ({**RUNNING, "reason": "NodeLost", "message": "node a"}, "NodeLost: node a", "Running"),
        (
            {
                "phase": "Pending",
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes",
                    }
                ],
            },
            None,
            "Pending (Unschedulable: 0/3 nodes)",
        ),
    ],
)
def test_what_is_the_matter_with_a_pod(status, cause, doing):
    found, doing_found = trouble({"status": status})
    assert found == cause
    assert doing in doing_found


def test_a_deleted_pod_is_dead_when_its_time_to_end_is_over():
    """On a node that is lost, it stays as it was last reported."""
    for ends, is_dead in ((PAST, True), ("2999-01-01T00:00:00Z", False)):
        cause, _ = trouble({"metadata": {"deletionTimestamp": ends}, "status": RUNNING})
        assert bool(cause) is is_dead
    ended = {"containerStatuses": [{"state": {"terminated": {"exitCode": 0}}}]}
    cause, _ = trouble({"metadata": {"deletionTimestamp": PAST}, "status": ended})
    assert cause == "exit code 0, no reason"


def test_a_lease_expires():
    now = datetime.now(UTC)
    assert has_expired(old_lease("a"), now)
    renewed = old_lease("a")
    renewed["spec"]["renewTime"] = now.isoformat().replace("+00:00", "Z")
    assert not has_expired(renewed, now)


# --- control flow ------------------------------------------------------------------------------


async def test_pods_play_through_the_tunnel_and_leave_nothing_behind(tmp_path):
    async with running(tmp_path, num_servers=2) as parts:
        objects = parts.cluster.objects
        assert (len(objects["Pod"]), len(objects["NetworkPolicy"])) == (2, 1)
        (policy,) = objects["NetworkPolicy"].values()
        assert policy["spec"]["egress"] == []
        assert objects["Service"] == {}
        (lease,) = objects["Lease"].values()
        first = lease["spec"]["renewTime"]
        await within(lambda: lease["spec"]["renewTime"] != first)
        assert parts.host.facts()["image"]["id"] == "image@sha256:12"

        async def play():
            async with parts.host.session() as session:
                large = {"text": "x" * 500_000}
                await session.reset(large, LIMIT_S)
                return (await session.step({"message": "a"}, LIMIT_S)).observation["pid"]

        assert len(set(await asyncio.gather(*(play() for _ in range(8))))) == 2


async def test_a_pod_that_dies_is_replaced_and_its_log_kept(tmp_path):
    async with running(tmp_path, max_restarts=1) as parts:
        (before,) = parts.cluster.pods
        await die(parts.host)
        async with asyncio.timeout(LIMIT_S), parts.host.session() as session:
            await session.reset({}, LIMIT_S)
        (after,) = parts.cluster.pods
        assert (before[-2:], after[-2:]) == ("-0", "-1")
        await die(parts.host)
        with pytest.raises(HostError, match=r"host\.max_restarts=1 .*exit code 9"):
            async with asyncio.timeout(LIMIT_S), parts.host.session():
                pass


async def test_a_server_that_dies_at_start_is_quoted_from_the_pods_log(tmp_path):
    with pytest.raises(HostError, match=r"died before it was ready: exit code 1") as caught:
        async with running(tmp_path, "dies"):
            pass
    assert "cannot find the dictionary" in str(caught.value)
    assert caught.value.log == tmp_path / "env-0.log"


async def test_a_pod_that_never_gets_ready_is_given_up(tmp_path):
    with pytest.raises(HostError, match=r"host\.start_timeout_s=0\.5; the pod is Running"):
        async with running(tmp_path, "mute", start_timeout_s=0.5):
            pass


async def test_services_are_made_for_use_inside_the_cluster(tmp_path):
    """The names of services do not resolve on this machine, so the start fails after creating the
    service."""
    cluster = FakeCluster(stub_command(STUB, "fine"))
    cluster.ready_at_once = True
    async with cluster.serving() as url:
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(kubeconfig(url)))
        host = KubernetesHost(
            *settings(kubeconfig=path, access="cluster", network="open", start_timeout_s=1.0),
            tmp_path,
        )
        starting = asyncio.create_task(host.start())
        await within(lambda: cluster.objects["Pod"])
        (service,) = cluster.objects["Service"].values()
        (created,) = cluster.objects["Pod"].values()
        assert service["spec"]["selector"] == created["metadata"]["labels"]
        assert cluster.objects["NetworkPolicy"] == {}
        with pytest.raises(HostError, match=r"openenv-pipe-\w+-0\.default\.svc:8000/health"):
            await starting


async def test_what_dead_runs_have_left_is_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(kubernetes_pod, "POLL_S", 0.05)
    create = FakeCluster.__init__

    def with_old_lease(self, command):
        create(self, command)
        self.objects["Lease"]["openenv-pipe-old"] = old_lease("openenv-pipe-old")

    monkeypatch.setattr(FakeCluster, "__init__", with_old_lease)
    async with running(tmp_path) as parts:
        assert parts.cluster.deleted == ["openenv-pipe-old"]


async def test_prune_removes_runs_whose_lease_has_expired(tmp_path, monkeypatch):
    cluster, told = FakeCluster(["true"]), []
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    monkeypatch.setattr(kubernetes_api, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    living = old_lease("openenv-pipe-living")
    living["spec"]["renewTime"] = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    cluster.objects["Lease"] |= {"old": old_lease("old"), "openenv-pipe-living": living}
    async with cluster.serving() as url:
        (tmp_path / "config").write_text(yaml.safe_dump(kubeconfig(url)))
        for dry_run in (True, False):
            await asyncio.to_thread(
                prune, dry_run=dry_run, namespace="default", context=None, notify=told.append
            )
            assert "old" in cluster.objects["Lease"] or not dry_run
    pods = "pods of the run old in namespace default"
    assert [line for line in told if "pods" in line] == [
        *(f"would be removed: {pods}", f"removed: {pods}"),
    ]
    assert cluster.deleted == ["old"]


async def test_a_lease_that_somebody_removes_ends_the_run(tmp_path):
    async with running(tmp_path) as parts:
        parts.cluster.objects["Lease"].clear()

        async def rejected():
            async with parts.host.session():
                await asyncio.sleep(0.05)

        with pytest.raises(HostError, match=r"lease .* was deleted"):
            async with asyncio.timeout(LIMIT_S):
                while True:
                    await rejected()
        parts.cluster.objects["Lease"][parts.host._run] = {"metadata": {}}


async def test_an_account_that_may_not_is_told_so(tmp_path):
    cluster = FakeCluster([])
    cluster.reject = 403
    async with cluster.serving() as url:
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(kubeconfig(url)))
        host = KubernetesHost(*settings(kubeconfig=path), tmp_path)
        with pytest.raises(HostError, match=r"403: pods is forbidden; docs/kubernetes\.md"):
            await host.start()


async def test_calls_that_are_rejected_all_the_time_are_no_silence(tmp_path, monkeypatch):
    monkeypatch.setattr(kubernetes_pod, "API_OUTAGE_S", 0.2)
    async with running(tmp_path) as parts:
        (pod,) = parts.host._pods
        for status, said in (
            (401, "has rejected all calls for 0.2 s: 401: no; log in to the cluster again"),
            (0, "has not answered for 0.2 s"),
        ):

            async def rejected(name, status=status):
                raise ClusterError(status, "no")

            with monkeypatch.context() as patched:
                patched.setattr(parts.host._cluster, "read_pod", rejected)
                assert said in await pod.died()


async def test_tokens_of_a_login_program_are_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(kubernetes_api, "REFRESH_EVERY_S", 0.05)
    login = f"""
import json
from pathlib import Path
calls = Path({str(tmp_path / "calls")!r})
number = int(calls.read_text()) if calls.exists() else 0
calls.write_text(str(number + 1))
kind = {{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}}
print(json.dumps({{**kind, "status": {{"token": f"token-{{number}}"}}}}))
"""
    given = kubeconfig("http://127.0.0.1:9")
    given["users"][0]["user"] = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": ["-c", login],
        }
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(given))
    cluster = await kubernetes_api.connect("default", None, str(path))
    keys = cluster._api.configuration.api_key
    assert keys["BearerToken"] == "Bearer token-0"
    async with asyncio.timeout(LIMIT_S):
        while keys["BearerToken"] == "Bearer token-0":
            await asyncio.sleep(0.01)
    await cluster.close()
    assert cluster._renewal.done()


async def test_no_cluster_and_an_unknown_context_are_user_errors(tmp_path):
    host = KubernetesHost(*settings(kubeconfig=tmp_path / "none"), tmp_path)
    with pytest.raises(ConfigError, match=r"host\.kubeconfig"):
        await host.start()
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(kubeconfig("http://127.0.0.1:9")))
    host = KubernetesHost(*settings(kubeconfig=path, context="other"), tmp_path)
    with pytest.raises(ConfigError, match="other"):
        await host.start()
    host = KubernetesHost(*settings(kubeconfig=path), tmp_path)
    with pytest.raises(HostError, match="check that the cluster is reachable"):
        await host.start()


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if ".containers.kubernetes" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes.aio", None)
    config = compose(["conf=echo", "host=kubernetes", "host.image=x"]).config
    with pytest.raises(ConfigError, match=r"\[kubernetes\]"):
        build_host(config, tmp_path)
