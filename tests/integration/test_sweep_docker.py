"""Shared servers in containers: jobs use one after another, a dead one restarts, and none is
left."""

from types import SimpleNamespace

import pytest

from openenv_pipe.errors import SessionClosedError
from openenv_pipe.extras.containers.docker.daemon import owned_containers
from openenv_pipe.extras.sweeps.leased_host import sharing
from tests.integration.test_docker_host import evaluated, nothing_is_left, probe
from tests.stub_server import started

pytestmark = pytest.mark.docker
__all__ = ["nothing_is_left"]  # pytest applies this fixture to every test here


def leased(provider, parts):
    env, config = parts
    return started(provider.host(SimpleNamespace(env=env, host=config), None))


@pytest.mark.parametrize("network", ["none-outbound", "bridge"])
async def test_one_container_serves_job_after_job(docker_client, tmp_path, network):
    ids = set()
    with sharing(tmp_path, lambda *_: None) as provider:
        for _ in range(3):
            async with leased(provider, probe(network=network)) as host, host.session() as session:
                assert await evaluated(session, "1 + 1") == 2
                assert host.facts()["image"]["id"].startswith("sha256:")
                (owned,) = owned_containers(docker_client)
                ids.add(owned.container.id)
    assert len(ids) == 1


async def test_a_dead_container_is_started_again_for_the_job_that_has_it(docker_client, tmp_path):
    starts = []
    with sharing(tmp_path, lambda *message: starts.append(message)) as provider:
        async with leased(provider, probe(network="bridge", max_restarts=1)) as host:
            async with host.session() as session:
                (owned,) = owned_containers(docker_client)
                owned.container.kill()
                with pytest.raises(SessionClosedError):
                    await evaluated(session, "__import__('time').sleep(9)")
            async with host.session() as session:  # the restarted container has another port
                assert await evaluated(session, "1 + 1") == 2
    assert starts == [("lease", "environment", True)]
