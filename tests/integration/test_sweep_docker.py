"""The keeper with containers: one for job after job, again after its death, and none is left."""

from contextlib import asynccontextmanager

import pytest

from openenv_pipe.commands.sweep.keeper import Keeper
from openenv_pipe.environments.hosts.docker.daemon import owned_containers
from openenv_pipe.environments.hosts.shared import KeptHost
from openenv_pipe.errors import SessionClosedError
from tests.integration.test_docker_host import evaluated, nothing_is_left, probe

pytestmark = pytest.mark.docker
__all__ = ["nothing_is_left"]  # used by every test here


@asynccontextmanager
async def keeping(folder):
    keeper = Keeper(folder)
    await keeper.start()
    try:
        yield keeper
    finally:
        await keeper.close()


@asynccontextmanager
async def borrowed(keeper, parts):
    host = KeptHost(*parts, keeper.socket)
    try:
        await host.start()
        yield host
    finally:
        await host.close()


@pytest.mark.parametrize("network", ["none-outbound", "bridge"])
async def test_one_container_serves_job_after_job(docker_client, tmp_path, network):
    ids = set()
    async with keeping(tmp_path) as keeper:
        for _ in range(3):
            async with borrowed(keeper, probe(network=network)) as host, host.session() as session:
                assert await evaluated(session, "1 + 1") == 2
                assert host.facts()["image"]["id"].startswith("sha256:")
                (owned,) = owned_containers(docker_client)
                ids.add(owned.container.id)
    assert len(ids) == 1


async def test_a_dead_container_is_started_again_for_the_job_that_has_it(docker_client, tmp_path):
    async with (
        keeping(tmp_path) as keeper,
        borrowed(keeper, probe(network="bridge", max_restarts=1)) as host,
    ):
        async with host.session() as session:
            (owned,) = owned_containers(docker_client)
            owned.container.kill()
            with pytest.raises(SessionClosedError):
                await evaluated(session, "__import__('time').sleep(9)")
        async with host.session() as session:  # at another port
            assert await evaluated(session, "1 + 1") == 2
        assert keeper.num_starts["serving"] == 1
