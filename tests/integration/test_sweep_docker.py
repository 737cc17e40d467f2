"""Shared servers in containers: jobs use one after another, a dead one restarts, and none is
left."""

from contextlib import asynccontextmanager

import pytest

from openenv_pipe.commands.sweep.shared_servers import SharedServers
from openenv_pipe.environments.hosts.docker.daemon import owned_containers
from openenv_pipe.environments.hosts.leased import LeasedHost
from openenv_pipe.errors import SessionClosedError
from tests.integration.test_docker_host import evaluated, nothing_is_left, probe

pytestmark = pytest.mark.docker
__all__ = ["nothing_is_left"]  # pytest applies this fixture to every test here


@asynccontextmanager
async def sharing(folder):
    servers = SharedServers(folder)
    await servers.start()
    try:
        yield servers
    finally:
        await servers.close()


@asynccontextmanager
async def leased(servers, parts):
    host = LeasedHost(*parts, servers.socket)
    try:
        await host.start()
        yield host
    finally:
        await host.close()


@pytest.mark.parametrize("network", ["none-outbound", "bridge"])
async def test_one_container_serves_job_after_job(docker_client, tmp_path, network):
    ids = set()
    async with sharing(tmp_path) as servers:
        for _ in range(3):
            async with leased(servers, probe(network=network)) as host, host.session() as session:
                assert await evaluated(session, "1 + 1") == 2
                assert host.facts()["image"]["id"].startswith("sha256:")
                (owned,) = owned_containers(docker_client)
                ids.add(owned.container.id)
    assert len(ids) == 1


async def test_a_dead_container_is_started_again_for_the_job_that_has_it(docker_client, tmp_path):
    async with (
        sharing(tmp_path) as servers,
        leased(servers, probe(network="bridge", max_restarts=1)) as host,
    ):
        async with host.session() as session:
            (owned,) = owned_containers(docker_client)
            owned.container.kill()
            with pytest.raises(SessionClosedError):
                await evaluated(session, "__import__('time').sleep(9)")
        async with host.session() as session:  # the restarted container has another port
            assert await evaluated(session, "1 + 1") == 2
        assert servers.num_starts["serving"] == 1
