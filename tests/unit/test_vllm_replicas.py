"""Several servers for one policy: routing, resources for each, and a server that dies."""

import asyncio
import dataclasses
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.engines import TokenRequest
from openenv_pipe.engines.vllm.routing import Router
from openenv_pipe.engines.vllm.servers import placements
from openenv_pipe.errors import ConfigError, EngineError, TrainingError
from tests.small_vllm import TOKENS, SmallServer, run_engine

pytestmark = pytest.mark.slow


def configured(*overrides: str):
    small = ("conf=smoke", "engine=vllm", "env.max_episode_tokens=64", "engine.max_restarts=1")
    return compose([*small, *overrides]).config.engine


# --- routing -------------------------------------------------------------------------------------


def stubs(count: int):
    return [
        SimpleNamespace(number=number, may_play=True, is_late=False, failure=None)
        for number in range(count)
    ]


def numbers(router: Router, *episodes: tuple[int, int | None]) -> list[int]:
    return [router.replica_of(episode, group).number for episode, group in episodes]


def test_an_episode_goes_where_the_fewest_are_and_stays():
    router = Router(stubs(3))
    router.begin_rollouts(6)
    first = [(episode, None) for episode in range(6)]
    assert numbers(router, *first) == [0, 1, 2, 0, 1, 2]
    for episode in (1, 4, 5):
        router.forget(episode)
    assert numbers(router, (6, None), (7, None), (8, None)) == [1, 1, 2]
    assert numbers(router, (0, None), (2, None), (3, None)) == [0, 2, 0]


def test_a_group_stays_together_up_to_its_server_s_share():
    router = Router(stubs(2))
    router.begin_rollouts(24)  # each server's share is 12
    groups = [[(8 * group + member, group) for member in range(8)] for group in range(3)]
    assert [numbers(router, *group) for group in groups] == [
        [0] * 8,
        [1] * 8,
        [0] * 4 + [1] * 4,
    ]


def test_episodes_of_a_dead_server_move_together_and_do_not_come_back():
    replicas = stubs(3)
    router = Router(replicas)
    router.begin_rollouts(12)
    episodes = [(episode, episode // 4) for episode in range(12)]
    assert numbers(router, *episodes) == [0] * 4 + [1] * 4 + [2] * 4
    replicas[1].may_play = False
    assert numbers(router, *episodes) == [0] * 4 + [0, 0, 2, 2] + [2] * 4
    replicas[1].may_play = True
    assert numbers(router, *episodes) == [0] * 4 + [0, 0, 2, 2] + [2] * 4
    assert numbers(router, (12, 3)) == [1]


def test_when_none_is_up_an_episode_waits_for_its_own():
    replicas = stubs(2)
    router = Router(replicas)
    assert numbers(router, (0, None), (1, None)) == [0, 1]
    for replica in replicas:
        replica.may_play = False
    assert numbers(router, (1, None), (2, None)) == [1, 0]


def test_a_server_without_the_last_policy_is_not_asked_even_when_the_other_is_down():
    replicas = stubs(2)
    router = Router(replicas)
    assert numbers(router, (0, None), (1, None)) == [0, 1]
    replicas[0].may_play, replicas[0].is_late = False, True
    replicas[1].may_play = False
    assert numbers(router, (0, None), (1, None), (2, None)) == [1, 1, 1]


def test_one_that_is_down_for_good_ends_it_all():
    replicas = stubs(2)
    router = Router(replicas)
    replicas[1].failure = EngineError("restarts are used up")
    with pytest.raises(EngineError, match="used up"):
        router.replica_of(0, None)


# --- two servers ---------------------------------------------------------------------------------


@asynccontextmanager
async def two_servers(tmp_path, *overrides: str):
    """Run an engine on two servers that have the current policy."""
    servers = [SmallServer(tmp_path / f"engine-{number}.log") for number in range(2)]
    running = run_engine(configured(*overrides), servers, tmp_path / "weights")
    async with running as (engine, weights, told):
        yield engine, servers, weights, told


def request(episode: int, turn: int = 0, group: int | None = None, member: int = 0) -> TokenRequest:
    return TokenRequest(
        episode=episode,
        turn=turn,
        prompt_ids=[episode],
        max_tokens=4,
        temperature=1.0,
        seed=episode,
        group_seed=group,
        member=member,
    )


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def test_a_policy_is_published_to_all_and_looked_at_on_each(tmp_path):
    async with two_servers(tmp_path) as (engine, servers, weights, told):
        weights.value = 0.5
        await engine.publish(1)
        for server, replica in zip(servers, engine.replicas, strict=True):
            assert server.values[replica.model] == 0.5
            assert not any("probe" in name for name in server.values)
        assert (await engine.metrics())["logprob_check/difference"] < 1e-9
        for number, server in enumerate(servers):
            assert any(text.startswith(f"engine {number}: ready at {server.url}") for text in told)
        servers[1].loads_old_policies = True
        weights.value = 0.75
        with pytest.raises(TrainingError, match=f"the server at {servers[1].url} has another"):
            await engine.publish(2)


async def test_an_adapter_must_count_on_every_server(tmp_path, monkeypatch):
    loading = SmallServer._load

    async def _load(self, request):
        answer = await loading(self, request)
        if self.log.name == "engine-1.log":
            self.values = dict.fromkeys(self.values, 0.0)
        return answer

    monkeypatch.setattr(SmallServer, "_load", _load)
    with pytest.raises(TrainingError, match="does not apply adapters"):
        async with two_servers(tmp_path):
            pass


async def test_turns_carry_the_version_of_their_own_server(tmp_path):
    async with two_servers(tmp_path) as (engine, servers, weights, _):
        engine.begin_rollouts(2, 2)
        for episode in (0, 1):
            assert (await engine.generate(request(episode))).policy_versions == [0]
        servers[1].may_load.clear()
        weights.value = 0.5
        publishing = asyncio.create_task(engine.publish(1))
        await until(lambda: engine.replicas[0].model != engine.replicas[1].model)
        versions = [
            (await engine.generate(request(episode, turn=1))).policy_versions for episode in (0, 1)
        ]
        assert versions == [[1], [0]]
        servers[1].may_load.set()
        await publishing
        assert (await engine.generate(request(1, turn=2))).policy_versions == [1]


async def test_a_dead_server_s_episodes_go_on_elsewhere_and_the_next_gets_the_policy(tmp_path):
    async with two_servers(tmp_path) as (engine, servers, weights, told):
        weights.value = 0.5
        await engine.publish(1)
        engine.begin_rollouts(8, 8)
        for server in servers:  # drop the requests of the readiness probe
            server.prompts.clear()
            server.seeds.clear()
        servers[0].may_sample.clear()
        groups = [[request(4 * g + m, group=100 * g, member=m) for m in range(4)] for g in (0, 1)]
        playing = [asyncio.create_task(engine.generate(each)) for each in groups[0] + groups[1]]
        await until(lambda: servers[0].prompts and len(servers[1].seeds) == 4)
        await servers[0].stop()
        completions = await asyncio.gather(*playing)
        assert [each.token_ids for each in completions] == [TOKENS] * 8
        assert sorted(servers[1].seeds) == [0, 1, 2, 3, 100, 101, 102, 103]
        assert servers[0].seeds == []
        servers[0].may_sample.set()
        await until(lambda: engine.replicas[0].client)
        assert servers[0].num_starts == 2
        assert servers[0].values[engine.replicas[0].model] == 0.5
        servers[0].seeds.clear()
        assert (await engine.generate(request(0, turn=1))).policy_versions == [1]
        # the episode stays on the server that has its keys and values
        assert servers[0].seeds == []
        assert (await engine.metrics())["engine/restarts"] == 1
        (death,) = (text for text in told if "exit code 137" in text)
        assert death.startswith("engine 0: ") and death.endswith("restart 1 of 1")


async def test_a_publish_goes_on_without_a_server_that_is_started_again(tmp_path):
    """The restarted server plays after it has received the latest policy, and not before."""
    async with two_servers(tmp_path) as (engine, servers, weights, _):
        engine.begin_rollouts(4, 4)
        servers[0].may_load.clear()
        await servers[0].stop()
        await until(lambda: not engine.replicas[0].client)
        for version in (1, 2):
            weights.value = 0.5 * version
            await engine.publish(version)
        for episode in (0, 1):
            assert (await engine.generate(request(episode))).policy_versions == [2]
        servers[0].seeds.clear()
        servers[0].may_load.set()
        await until(lambda: engine.replicas[0].may_play)
        assert servers[0].values[engine.replicas[0].model] == 1.0
        assert (await engine.generate(request(2))).policy_versions == [2]
        assert len(servers[0].seeds) == 1
        weights.value = 1.5
        await engine.publish(3)
        assert servers[0].values[engine.replicas[0].model] == 1.5


async def test_a_server_that_has_missed_a_publish_plays_after_the_next(tmp_path):
    """The server came up just after the publish had skipped it."""
    async with two_servers(tmp_path) as (engine, servers, weights, _):
        engine.begin_rollouts(2, 2)
        weights.value = 0.5
        replica = engine.replicas[0]
        replica.is_late = True
        servers[0].seeds.clear()
        for episode in (0, 1):
            await engine.generate(request(episode))
        assert servers[0].seeds == []
        await engine.publish(1)
        assert replica.may_play


async def test_when_all_are_down_a_publish_waits(tmp_path):
    async with two_servers(tmp_path) as (engine, servers, weights, _):
        for server in servers:
            server.may_start.clear()
            await server.stop()
        await until(lambda: not any(replica.client for replica in engine.replicas))
        weights.value = 0.5
        publishing = asyncio.create_task(engine.publish(1))
        done, _ = await asyncio.wait([publishing], timeout=0.05)
        assert not done
        for server in servers:
            server.may_start.set()
        await publishing
        # Of two servers, the publish reaches the one that came up first; the other gets it at its
        # restart.
        await until(lambda: all(replica.may_play for replica in engine.replicas))
        assert [s.values[r.model] for s, r in zip(servers, engine.replicas, strict=True)] == [
            0.5
        ] * 2


async def test_a_server_that_cannot_come_back_ends_the_run_with_its_log(tmp_path):
    async with two_servers(tmp_path) as (engine, servers, _, _):
        engine.begin_rollouts(2, 2)
        servers[0].starts_dead = True
        await servers[0].stop()
        await until(lambda: engine.replicas[0].failure)
        with pytest.raises(EngineError, match=r"max_restarts=1 are used up") as caught:
            await engine.generate(request(0))
        assert "| ImportError: no such kernel" in str(caught.value)


# --- resources for each server -------------------------------------------------------------------


def test_cores_are_split():
    def cores(count: int, available: int) -> list[dict[str, str]]:
        config = configured(f"engine.num_servers={count}")
        return placements(config, on_gpu=False, free_gpus=[], cores=range(available))

    bind = "VLLM_CPU_OMP_THREADS_BIND"
    assert cores(1, 4) == [{}]
    assert cores(2, 5) == [{bind: "0,1"}, {bind: "2,3"}]
    assert cores(3, 2) == [{bind: "0"}, {bind: "1"}, {bind: "0"}]


def test_gpus_that_the_learner_leaves_are_split():
    def gpus(count: int, free: list[str], share: float = 0.4) -> list[dict[str, str]]:
        config = configured(f"engine.num_servers={count}", f"engine.gpu_memory_share={share}")
        return placements(config, on_gpu=True, free_gpus=free, cores=[])

    visible = "CUDA_VISIBLE_DEVICES"
    assert gpus(1, []) == [{}]
    assert gpus(1, ["1"]) == [{visible: "1"}]
    assert gpus(2, ["1", "2", "3", "4"]) == [{visible: "1,2"}, {visible: "3,4"}]
    assert gpus(2, [], share=0.3) == [{}, {}]
    with pytest.raises(ConfigError, match=r"num_servers=3, but the learner leaves only 2 GPUs"):
        gpus(3, ["1", "2"])
    with pytest.raises(ConfigError, match=r"num_servers=2 servers on the .*share=0\.5 each"):
        gpus(2, [], share=0.5)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["engine.url=[http://a:1,http://b:1,http://a:1]"], "names a server twice"),
        (["engine.url=[]"], "engine.url"),
        (["engine.url=[nonsense]"], "engine.url"),
    ],
)
def test_servers_that_make_no_sense_are_rejected(overrides, why):
    with pytest.raises(ConfigError, match=why):
        configured("engine.launch=attach", *overrides)
    several = configured("engine.launch=attach", "engine.url=[http://a:1,http://b:1]")
    assert several.urls == ["http://a:1", "http://b:1"]


async def test_only_tokens_of_the_run_are_counted(tmp_path, monkeypatch):
    """The server has answered others before, and has generated a token at its start."""
    starting = SmallServer.start

    async def start(self):
        self.seeds += range(1000)
        await starting(self)

    monkeypatch.setattr(SmallServer, "start", start)
    async with two_servers(tmp_path) as (engine, _, _, _):
        engine.begin_rollouts(3, 3)
        for episode in range(3):
            await engine.generate(request(episode))
        # One completion is one token on the page of `SmallServer`.
        assert (await engine.metrics())["engine/generated_tokens"] == 3


async def test_a_server_gets_the_prompt_of_the_request(tmp_path):
    """With `model.history=rerender`, the template may have changed what came before."""
    async with two_servers(tmp_path) as (engine, servers, _, _):
        engine.begin_rollouts(1, 1)
        await engine.generate(request(5))
        await engine.generate(dataclasses.replace(request(5, turn=1), prompt_ids=[5, 8, 9]))
        prompts = [prompt for server in servers for prompt in server.prompts if prompt[0] == 5]
        assert prompts == [[5], [5, 8, 9]]
