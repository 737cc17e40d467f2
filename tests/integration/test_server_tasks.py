"""Tasks that a real server lists, and collections on several servers with one session each."""

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.environments.hosts.process import EnvProcess, ProcessHost
from openenv_pipe.environments.tasks import known_splits, open_splits
from openenv_pipe.environments.tasks.server import list_splits
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.http import bearer
from tests.fakes import collect, run_config, sampled, tiny_policy
from tests.stub_server import stub_command

# Plays as tests/fakes.py does, with delays that grow, and rejects sessions above
# MAX_CONCURRENT_ENVS.
KEY = "a-key-of-this-test"
ACCESS = bearer(KEY)
SERVER = """
async def answer(data, number, seed):
    await asyncio.sleep(os.getpid() % 7 / 300)  # no two servers are equally fast
    return {"observation": {"text": f"{seed} {number}"}, "reward": 0.5, "done": number == 2}
"""


async def test_four_servers_with_one_session_play_what_one_with_four_plays(tmp_path):
    policy = tiny_policy(ends=True)
    found = []
    for num_servers, sessions_per_server in ((4, 1), (1, 4)):
        config = run_config({"env.command": stub_command(SERVER)})
        changes = {"num_servers": num_servers, "sessions_per_server": sessions_per_server}
        host = ProcessHost(config.env, config.host.model_copy(update=changes), tmp_path)
        try:
            await host.start()
            assert host.capacity == num_servers * sessions_per_server
            groups = await collect(policy, host=host, config=config, num_tasks=4, group_size=3)
        finally:
            await host.close()
        assert not any(episode.failed for group in groups for episode in group.episodes)
        found.append(sampled(groups))
    assert found[0] == found[1]


@pytest.fixture
async def echo_server(tmp_path):
    config = compose(["conf=echo"]).config
    server = EnvProcess(config.env, config.host, 0, tmp_path / "log", KEY)
    await server.start()
    yield server.url
    await server.stop()


def config_with(split, num_eval_tasks=100):
    values = compose(["conf=echo"]).config.model_dump()
    values["eval"]["num_tasks"] = num_eval_tasks
    block = {"type": "server", "seed_start": None, "reset": {"turns": 4}}
    values["env"]["tasks"] |= {
        "train": block | {"split": "train"},
        "eval": block | {"split": split},
    }
    return run_config().model_validate(values)


async def test_a_server_says_how_many_tasks_it_has(echo_server):
    async def splits(config):
        return await open_splits(config, known_splits(config), echo_server, ACCESS)

    told = await list_splits(echo_server, ACCESS)
    assert [(each.name, each.num_tasks) for each in told] == [("train", 400), ("eval", 100)]
    assert await list_splits(f"{echo_server}/elsewhere", ACCESS) == []
    found = await splits(config_with("eval"))
    assert (len(found.train), len(found.eval)) == (400, 100)
    assert found.eval[99].reset == {"split": "eval", "index": 99, "turns": 4}
    with pytest.raises(ConfigError, match=r"eval\.num_tasks=101 is more than the 100 tasks"):
        await splits(config_with("eval", 101))
    with pytest.raises(ConfigError, match=r"env\.tasks\.eval\.split='test'.* train, eval"):
        await splits(config_with("test"))
    with pytest.raises(ConfigError, match="share tasks"):
        await splits(config_with("train"))


async def test_a_server_without_the_task_api_is_explained(tmp_path):
    from openenv_pipe.environments.tasks.server import server_rows
    from tests.integration.test_process_host import settings, write_package

    parts = settings(package=write_package(tmp_path / "parrot"))
    server = EnvProcess(*parts, 0, tmp_path / "log", KEY)
    await server.start()
    try:
        with pytest.raises(ConfigError, match=r"/parrot/splits answers 501 .*type range, file"):
            await server_rows(server.url, ACCESS, "train", "env.tasks.train")
    finally:
        await server.stop()
