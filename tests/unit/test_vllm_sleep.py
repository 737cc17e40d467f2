"""Servers that give their memory to the learner: when they sleep, and the order of waking up.

vLLM itself sleeps on GPUs only. tests/integration/test_vllm_engine.py shows what a server on a CPU
does with these requests.
"""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch
from fakes import tiny_policy
from transformers import GPT2Config

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.vllm.check import check_engine
from openenv_pipe.engines.vllm.server_command import ServerSpec, server_arguments
from openenv_pipe.engines.vllm.sleep_mode import LearnerFootprint, sleep_level
from openenv_pipe.errors import ConfigError, TrainingError
from openenv_pipe.pipeline import engines as assembly
from tests.small_vllm import SmallServer, run_engine

SMALL = ("conf=smoke", "engine=vllm", "env.max_episode_tokens=64", "engine.max_restarts=1")


def configured(*overrides: str):
    return compose([*SMALL, *overrides]).config.engine


# --- whether a server sleeps ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, 1),
        ({"way": "merged"}, 2),
        ({"way": "full"}, 2),
        ({"needs_bytes": 60}, 0),  # both fit: 60 of 100 beside a share of 0.4
        ({"needs_bytes": 0}, 0),  # the learner's need is unknown
        ({"free_gpus": ["1"]}, 0),
        ({"plays_ahead": True}, 0),
        ({"on_gpu": False}, 0),
        ({"override": "engine.num_servers=2", "needs_bytes": 20}, 0),
        ({"override": "engine.num_servers=2", "needs_bytes": 21}, 1),
        ({"override": "engine.sleep=never"}, 0),
    ],
)
def test_memory_decides(changes, level):
    values = {"on_gpu": True, "gpu_bytes": 100, "needs_bytes": 61} | changes
    way, override = values.pop("way", "adapter"), values.pop("override", "engine.sleep=auto")
    assert sleep_level(configured(override), LearnerFootprint(**values), mode=way) == level


def test_the_learner_s_needs_are_estimated_and_its_gpus_left_alone(monkeypatch):
    config = compose([*SMALL, "trainer.max_staleness=1"]).config
    policy = SimpleNamespace(
        device=torch.device("cuda"), model=tiny_policy().model, num_parameters=7_000_000
    )
    properties = SimpleNamespace(total_memory=10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    footprint = assembly._footprint(config, policy)
    assert footprint.needs_bytes > 4 * 4 * policy.num_parameters  # weights, gradients, moments
    assert (footprint.gpu_bytes, footprint.free_gpus) == (10**9, ["5", "7"])
    assert footprint.plays_ahead
    policy.model = SimpleNamespace(config=GPT2Config())  # whose memory cannot be estimated
    assert assembly._footprint(config, policy).needs_bytes == 0
    policy.device = torch.device("cpu")
    assert assembly._footprint(config, policy) == LearnerFootprint(on_gpu=False)


def test_an_attached_server_sleeps_only_when_told_so():
    attached = ("engine.launch=attach", "engine.url=http://a:1")
    crowded = LearnerFootprint(on_gpu=True, gpu_bytes=100, needs_bytes=99)
    assert sleep_level(configured(*attached), crowded, mode="adapter") == 0
    asked = configured(*attached, "engine.sleep=level1")
    assert sleep_level(asked, crowded, mode="adapter") == 1


def test_sleep_is_no_argument():
    with pytest.raises(ConfigError, match=r"engine\.sleep sets it"):
        configured("engine.arguments=['--enable-sleep-mode']")


def test_sleep_that_gains_nothing_is_rejected():
    with pytest.raises(ConfigError, match="learns on a CPU, where vLLM cannot sleep"):
        check_engine(configured("engine.sleep=level1"), "cpu", "full")
    apart = LearnerFootprint(on_gpu=True, free_gpus=["1"])
    with pytest.raises(ConfigError, match="GPUs that the learner does not use"):
        sleep_level(configured("engine.sleep=level2"), apart, mode="full")


def test_a_server_that_shall_sleep_is_started_so():
    def arguments(*, sleeps: bool) -> list[str]:
        known = {"revision": None, "build": "cuda", "dtype": "float32", "lora_rank": 0}
        return server_arguments(
            ServerSpec(model="/m", sleeps=sleeps, **known), configured(), "h", 1
        )

    assert "--enable-sleep-mode" in arguments(sleeps=True)
    assert "--enable-sleep-mode" not in arguments(sleeps=False)


# --- how a server sleeps and wakes ---------------------------------------------------------------


@asynccontextmanager
async def sleeping(tmp_path, way: str, level: int, *overrides: str):
    """Run an engine with one server that may sleep, after its first publish."""
    server, config = SmallServer(tmp_path / "engine.log"), configured(*overrides)
    running = run_engine(config, [server], tmp_path / "weights", way, sleep_level=level)
    async with running as (engine, weights, _):
        server.calls.clear()
        weights.num_freed = 0
        yield engine, server, weights


async def test_an_adapter_comes_between_weights_and_cache(tmp_path):
    """Trap 18: the server's weights wake first, then it loads the adapter, then its cache wakes."""
    async with sleeping(tmp_path, "adapter", 1) as (engine, server, weights):
        await engine.begin_update(idle=True)
        assert server.asleep == {"weights", "kv_cache"}
        assert weights.num_freed == 0
        weights.value = 0.5
        await engine.publish(1)
        assert server.calls == [
            "/sleep?level=1&mode=wait",
            "/wake_up?tags=weights",
            "/v1/load_lora_adapter",
            "/wake_up?tags=kv_cache",
        ]
        assert weights.num_freed == 1
        measured = await engine.metrics()
        assert measured["logprob_check/difference"] < 1e-9 and measured["time/sleep_s"] > 0


async def test_dropped_weights_come_back_before_anything_is_sampled(tmp_path):
    async with sleeping(tmp_path, "full", 2) as (engine, server, weights):
        for version in (1, 2):
            await engine.begin_update(idle=True)
            assert server.values["base"] != server.values["base"]
            weights.value = 0.5 * version
            await engine.publish(version)
            assert server.values == {"base": 0.5 * version}
        once = [
            "/sleep?level=2&mode=wait",
            "/wake_up?tags=weights",
            "/collective_rpc",
            "/update_weight_version",
            "/wake_up?tags=kv_cache",
        ]
        assert server.calls == once * 2


async def test_what_sleep_has_spoilt_stops_the_run(tmp_path):
    """Trap 18: the server fails to load new weights after its sleep."""
    async with sleeping(tmp_path, "full", 2) as (engine, server, weights):
        await engine.begin_update(idle=True)
        server.loads_old_policies = True  # level 2 has dropped the old weights
        weights.value = 0.5
        with pytest.raises(TrainingError, match=r"is nan there and -\d+\.\d+ here"):
            await engine.publish(1)


async def test_a_server_that_died_in_its_sleep_is_sent_the_policy_awake(tmp_path):
    async with sleeping(tmp_path, "adapter", 1) as (engine, server, weights):
        await engine.begin_update(idle=True)
        await server.stop()
        weights.value = 0.5
        await engine.publish(1)
        assert server.num_starts == 2
        assert server.values[engine.replicas[0].model] == 0.5
        assert not any("tags" in call for call in server.calls)


async def test_awake_means_never_asked(tmp_path):
    async with sleeping(tmp_path, "adapter", 0) as (engine, server, weights):
        await engine.begin_update(idle=True)
        await engine.publish(1)
        assert server.calls == ["/v1/load_lora_adapter"]
        assert weights.num_freed == 0


ATTACHED = ("engine.launch=attach", "engine.url=http://a:1", "engine.sleep=level1")


async def test_an_attached_server_is_not_left_asleep(tmp_path):
    async with sleeping(tmp_path, "adapter", 1, *ATTACHED) as (engine, server, _):
        await engine.begin_update(idle=True)
        server.stop = lambda: asyncio.sleep(0)  # an attached server is not ours to stop
    assert server.asleep == set()
    assert set(server.values) == {"base"}
    await SmallServer.stop(server)


async def test_an_attached_server_that_cannot_sleep_is_rejected(tmp_path, monkeypatch):
    made = SmallServer.__init__

    def awake(self, log):
        made(self, log)
        self.has_sleep_mode = False

    monkeypatch.setattr(SmallServer, "__init__", awake)
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"):
        async with sleeping(tmp_path, "adapter", 1, *ATTACHED):
            pass
