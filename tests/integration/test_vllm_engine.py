"""The engine on a real vLLM server: what it samples, and what it serves after a publish.

The tests share one server (tests/vllm_server.py). Servers that a run starts are in
test_vllm_train.py.
"""

import asyncio
import contextlib
import itertools
import json
from dataclasses import replace

import pytest
import torch

from openenv_pipe.engines import Completion, TokenRequest
from openenv_pipe.engines.vllm.client import VllmClient
from openenv_pipe.engines.vllm.connection import BASE
from openenv_pipe.engines.vllm.ownership import Owner
from openenv_pipe.errors import ConfigError, EngineError, TrainingError
from openenv_pipe.models.policy import Policy
from openenv_pipe.system import readiness
from openenv_pipe.system.http import Access, HttpClient, bearer
from tests.fakes import DROPS_THOUGHTS, FakeHost, all_episodes, collect
from tests.vllm_runs import (
    AS_PROGRAM,
    PLANNING_PROGRAM,
    assert_trained_and_agreed,
    start,
)
from tests.vllm_runs import LIMIT_S as START_LIMIT_S
from tests.vllm_server import LORA_RANK, ServerProxy, opened

pytestmark = pytest.mark.vllm
LORA = f"model.lora.rank={LORA_RANK}"
LIMIT_S = 120.0  # waits for what takes a moment on an idle machine


@pytest.fixture
async def base_weights(vllm_served):
    """Restores the server's base model after a test that has replaced all weights."""
    yield
    client = VllmClient(vllm_served.url, api_key=vllm_served.key, request_timeout_s=60)
    async with client, client.replacing_weights():
        await client.load_weights(vllm_served.base, "0")


def change(policy: Policy, size: float = 0.02) -> None:
    """Change the trained weights, as an update does."""
    draw = torch.Generator().manual_seed(7)
    for _, parameter in policy.trained_parameters():
        parameter.data += size * torch.randn(parameter.shape, generator=draw)


def request(
    episode: int = 0, *, seed: int = 5, max_tokens: int = 16, turn: int = 0
) -> TokenRequest:
    return TokenRequest(
        episode=episode,
        turn=turn,
        prompt_ids=[2, 40, 50, 60, 3],
        max_tokens=max_tokens,
        temperature=1.0,
        seed=seed,
    )


def largest_difference(policy: Policy, episodes, temperature: float) -> float:
    """Return the largest difference between the trainer's logprobs and the sampler's, over all
    turns."""
    differences = []
    for episode in episodes:
        ids = [id for turn in episode.turns for id in turn.prompt_ids + turn.completion_ids]
        with torch.no_grad():
            logits = policy.logits(policy.hidden(torch.tensor([ids])))[0]
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        start = 0
        for turn in episode.turns:
            start += len(turn.prompt_ids)
            for offset, id in enumerate(turn.completion_ids):
                mine = logprobs[start + offset - 1, id].item()
                differences.append(abs(mine - turn.logprobs[offset]))
            start += len(turn.completion_ids)
    return max(differences)


# --- what is sampled -----------------------------------------------------------------------------


async def test_sampler_and_trainer_agree_at_every_temperature(vllm_served, tmp_path):
    """Traps 4 and 5, over several turns, with an adapter whose weights are not zero."""
    async with opened(vllm_served, tmp_path, LORA) as (engine, policy):
        change(policy)
        await engine.publish(1)
        for temperature in (0.7, 1.0, 1.3):
            groups = await collect(policy, engine=engine, temperature=temperature)
            episodes = all_episodes(groups)
            assert largest_difference(policy, episodes, temperature) < 1e-4
            assert largest_difference(policy, episodes, temperature + 0.1) > 1e-2
            assert {v for e in episodes for t in e.turns for v in t.policy_versions} == {1}
        measured = await engine.metrics()
        assert measured["engine/generated_tokens"] >= sum(e.num_completion_tokens for e in episodes)


async def test_the_same_seed_gives_the_same_tokens_in_any_company(vllm_served, tmp_path):
    """A retried request gets the same tokens, and a group's member the same as when it is sent
    alone."""
    async with opened(vllm_served, tmp_path, LORA) as (engine, _):
        first = engine.begin_rollouts(34, 34)
        alone = await engine.generate(request(first))
        many = await asyncio.gather(
            *(engine.generate(request(first + 1 + number, seed=5 + number)) for number in range(33))
        )
        assert_same(many[0], alone)
        assert len({tuple(completion.token_ids) for completion in many}) == 33
        first = engine.begin_rollouts(5, 5)
        group = [
            replace(request(first + member), group_seed=77, member=member) for member in range(4)
        ]
        together = await asyncio.gather(*map(engine.generate, group))
        assert_same(await engine.generate(replace(group[2], episode=first + 4)), together[2])
        assert len({tuple(completion.token_ids) for completion in together}) == 4


def assert_same(one: Completion, other: Completion) -> None:
    """Assert equal tokens, and logprobs to 1e-5: other batches may round in another way."""
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


async def test_a_cancelled_request_is_aborted_on_the_server(vllm_served, tmp_path):
    """The server is paused while it has the requests, so that none ends before it is aborted."""
    async with (
        ServerProxy(vllm_served.url) as proxy,
        opened(vllm_served, tmp_path, LORA, f"engine.url={proxy.url}") as (engine, _),
        VllmClient(vllm_served.url, api_key=vllm_served.key, request_timeout_s=60) as client,
    ):
        engine.begin_rollouts(9, 8)
        before, asked = await generated(client), proxy.num_asked
        async with client.replacing_weights():
            tasks = [
                asyncio.create_task(engine.generate(request(number, max_tokens=240)))
                for number in range(8)
            ]
            await proxy.until_asked(asked + 8)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert len((await engine.generate(request(8, max_tokens=240))).token_ids) == 240
        # The others would have got as many by now, had they gone on.
        assert await generated(client) - before < 4 * 240


async def generated(client: VllmClient) -> float:
    from openenv_pipe.engines.vllm.server_metrics import read_metrics

    return read_metrics(await client.metrics_text())["generation_tokens_total"]


async def test_episodes_go_on_when_one_of_two_servers_is_lost(vllm_served, tmp_path, monkeypatch):
    """Its episodes get the tokens that they would have got without the loss.

    Both addresses lead to one server.
    """
    monkeypatch.setattr(readiness, "OUTAGE_POLL_S", 0.1)
    async with ServerProxy(vllm_served.url) as first, ServerProxy(vllm_served.url) as second:
        urls = f"engine.url=[{first.url},{second.url}]"
        async with opened(vllm_served, tmp_path, LORA, urls) as (engine, policy):
            change(policy)
            await engine.publish(1)
            engine.begin_rollouts(17, 16)
            asked = first.num_asked
            first.may_answer.clear()
            playing = [
                asyncio.create_task(engine.generate(request(number, seed=number, max_tokens=200)))
                for number in range(16)
            ]
            await first.until_asked(asked + 1)
            await first.close()
            completions = await asyncio.gather(*playing)
            assert {version for each in completions for version in each.policy_versions} == {1}
            assert_same(await engine.generate(request(16, seed=0, max_tokens=200)), completions[0])
            while engine.replicas[0].client:
                await asyncio.sleep(0.01)
            await first.open()
            change(policy)
            await engine.publish(2)
            measured = await engine.metrics()
            assert measured["logprob_check/difference"] < 1e-4 < measured["logprob_check/moved"]
            assert measured["engine/restarts"] == 1


# --- publishing ----------------------------------------------------------------------------------


async def test_old_adapters_are_retired_and_the_last_three_stay(vllm_served, tmp_path):
    """Trap 16: the prompt is always the same, and every adapter has a new name."""
    async with opened(vllm_served, tmp_path, LORA) as (engine, policy):
        for version in range(1, 6):
            change(policy, 0.01 * version)
            await engine.publish(version)
            assert (await engine.metrics())["logprob_check/difference"] < 1e-4
        client = engine.replicas[0].client
        names = await client.adapters()
        kept, root = engine._versions._adopted, engine._versions.transfer._root
        served = [name for name in names if name.startswith(root.name)]
        assert served == [published.name for published in kept]
        assert [published.step for published in kept] == [3, 4, 5]
        folders = sorted(root.glob("*-step-*"))
        assert [folder.name for folder in folders] == served


async def test_a_second_run_is_rejected_and_its_tokens_are_never_used(
    vllm_served, tmp_path, base_weights
):
    merged = (LORA, "engine.publish=merged")
    async with opened(vllm_served, tmp_path / "first", *merged) as (engine, policy):
        for way in (merged, (LORA,)):
            with pytest.raises(ConfigError, match=rf"in use by another run: '{tmp_path / 'first'}"):
                async with opened(vllm_served, tmp_path / "second", *way):
                    pass
        change(policy)
        await engine.publish(1)
        episodes = all_episodes(await collect(policy, engine=engine, host=FakeHost()))
        assert largest_difference(policy, episodes, 1.0) < 1e-4
        other = Owner.new("runs/other/0007")
        client = VllmClient(vllm_served.url, api_key=vllm_served.key, request_timeout_s=60)
        async with client, client.replacing_weights():
            await client.load_weights(vllm_served.base, other.label(3))
        with pytest.raises(EngineError, match="the weights of another run: 'runs/other/0007"):
            await collect(policy, engine=engine, host=FakeHost())
    async with opened(vllm_served, tmp_path / "third", *merged) as (engine, policy):
        assert (await engine.generate(request())).policy_versions == [0]


@pytest.mark.parametrize(
    "given",
    [{}, {"Authorization": "Bearer another"}, {"Origin": "http://evil.example"}],
    ids=["no key", "another key", "a web page"],
)
async def test_nobody_without_the_key_gets_an_answer(vllm_served, given):
    paths = ["/health", "/metrics", "/v1/models", "/openapi.json", "/docs", "/version", "/ping"]
    posted = ["/collective_rpc", "/v1/completions", "/inference/v1/generate", "/pause", "/sleep"]
    posted += ["/v1/load_lora_adapter", "/update_weights", "/tokenize", "/invocations"]
    body = {"method": "reload_policy", "kwargs": {"weights_path": "/nowhere"}}
    async with HttpClient(vllm_served.url, Access(headers=given)) as client:
        for path in paths:
            assert (await client.request("GET", path, timeout_s=60)).status == 401
        for path in posted:
            response = await client.request("POST", path, timeout_s=60, body=body)
            assert (response.status, response.content) == (401, b"the key is missing or wrong")


async def test_with_the_key_only_what_the_run_uses_is_served(vllm_served):
    async with HttpClient(vllm_served.url, bearer(vllm_served.key)) as client:
        for path, status in {"/health": 200, "/openapi.json": 404, "/docs": 404}.items():
            assert (await client.request("GET", path, timeout_s=60)).status == status


@pytest.mark.parametrize("transfer", ["files", "broadcast"])
@pytest.mark.parametrize("way", ["merged", "full"])
async def test_all_weights_are_published_into_requests_under_way(
    vllm_served, tmp_path, base_weights, way, transfer
):
    """Trap 16: each turn records the versions that sampled it, and cached keys and values are
    dropped."""
    overrides = [LORA, "engine.publish=merged"] if way == "merged" else []
    overrides.append(f"engine.weight_transfer={transfer}")
    async with opened(vllm_served, tmp_path, *overrides) as (engine, policy):
        numbers, is_over = itertools.count(engine.begin_rollouts(100_000, 32)), asyncio.Event()
        found: list[list[int]] = []

        async def play() -> None:
            while not is_over.is_set():
                number = next(numbers)
                length = 8 * (1 + number % 29)
                completion = await engine.generate(request(number, seed=number, max_tokens=length))
                found.append(completion.policy_versions)

        players = [asyncio.create_task(play()) for _ in range(32)]
        async with asyncio.timeout(5 * LIMIT_S):
            for version in itertools.count(1):  # one publish may meet only requests that have ended
                change(policy, 0.02 * (-1) ** version)
                await engine.publish(version)
                if any(len(versions) > 1 for versions in found):
                    break
        is_over.set()
        await asyncio.gather(*players)
        assert all(versions == sorted(set(versions)) for versions in found)
        measured = await engine.metrics()
        assert measured["logprob_check/difference"] < 1e-4 < measured["logprob_check/moved"]
        episodes = all_episodes(await collect(policy, engine=engine, host=FakeHost()))
        assert largest_difference(policy, episodes, 1.0) < 1e-4


@pytest.mark.parametrize("transfer", ["files", "broadcast"])
async def test_a_server_that_comes_back_gets_all_weights_again(
    vllm_served, tmp_path, base_weights, monkeypatch, transfer
):
    """The server has the base weights, as after a start, and has cached their keys and values."""
    monkeypatch.setattr(readiness, "OUTAGE_POLL_S", 0.1)
    async with ServerProxy(vllm_served.url) as proxy:
        overrides = (f"engine.url={proxy.url}", f"engine.weight_transfer={transfer}")
        async with opened(vllm_served, tmp_path, *overrides) as (engine, policy):
            change(policy)
            await engine.publish(1)
            await proxy.close()
            while engine.replicas[0].client:
                await asyncio.sleep(0.01)
            url, key = vllm_served.url, vllm_served.key
            async with VllmClient(url, api_key=key, request_timeout_s=60) as client:
                await client.load_weights(vllm_served.base, "0")
                await client.reset_prefix_cache()
                for prompt in engine._logprob_check.prompts:
                    await client.generate(BASE, prompt, {"max_tokens": 1})
            await proxy.open()
            completion = await engine.generate(request(engine.begin_rollouts(1, 1)))
            assert completion.policy_versions == [1]
            # as measured by the logprob check after the restart
            assert engine.replicas[0].difference < 1e-4
            change(policy)
            await engine.publish(2)
            assert (await engine.metrics())["logprob_check/difference"] < 1e-4


async def test_an_adapter_stays_with_its_requests(vllm_served, tmp_path):
    async with (
        ServerProxy(vllm_served.url) as proxy,
        opened(vllm_served, tmp_path, LORA, f"engine.url={proxy.url}") as (engine, policy),
    ):
        engine.begin_rollouts(2, 2)
        asked = proxy.num_asked
        old = asyncio.create_task(engine.generate(request(0, max_tokens=240)))
        await proxy.until_asked(asked + 1)
        change(policy)
        await engine.publish(1)
        new = await engine.generate(request(1, max_tokens=4))
        assert (await old).policy_versions == [0]
        assert new.policy_versions == [1]


@pytest.mark.parametrize("way", ["adapter", "full"])
async def test_a_server_takes_sleep_and_wake_in_this_order(
    vllm_served, tmp_path, base_weights, way
):
    """Trap 18, as far as a CPU shows it.

    On a CPU vLLM frees no memory in its sleep, but requests wait for the next policy.
    `unit/test_vllm_sleep` tests the order of the calls.
    """
    level, more = (1, [LORA]) if way == "adapter" else (2, [])
    async with opened(vllm_served, tmp_path, *more) as (engine, policy):
        engine._sleep_level = level
        first = engine.begin_rollouts(4, 4)
        for version in (1, 2):
            await engine.begin_update(idle=True)
            early = asyncio.create_task(engine.generate(request(first + 2 * version - 1)))
            change(policy)
            await asyncio.sleep(0.05)
            assert not early.done()
            await engine.publish(version)
            assert len((await early).token_ids) > 0
            completion = await engine.generate(request(first + 2 * version - 2))
            assert completion.policy_versions == [version]
            measured = await engine.metrics()
            assert measured["logprob_check/difference"] < 1e-4 < measured["logprob_check/moved"]


@pytest.mark.parametrize("play", ["loop", "rerender", "program"])
def test_three_steps_with_an_adapter(vllm_served, tmp_path, play):
    """Of the pipeline's loop, of a template that rewrites earlier turns, and of a program."""
    (tmp_path / "agent.py").write_text(PLANNING_PROGRAM)
    more = {
        "loop": (),
        "rerender": ("model.history=rerender", f"model.chat_template={json.dumps(DROPS_THOUGHTS)}"),
        "program": AS_PROGRAM,
    }[play]
    run = start(tmp_path, *vllm_served.attach, f"model.lora.rank={LORA_RANK}", *more)
    try:
        assert run.wait(START_LIMIT_S) == 0, run.err
    finally:
        run.kill()
    assert_trained_and_agreed(tmp_path)


# --- the logprob check ---------------------------------------------------------------------------


async def test_a_stale_adapter_stops_the_run(vllm_served, tmp_path, monkeypatch):
    """Trap 16, provoked: a new adapter name serves the old weights. The error gives both
    logprobs."""
    async with opened(vllm_served, tmp_path, LORA) as (engine, policy):
        client = engine.replicas[0].client
        load = client.load_adapter
        (old,) = engine._versions.transfer._root.glob("*-step-0")
        monkeypatch.setattr(client, "load_adapter", lambda name, folder: load(name, old))
        change(policy)
        with pytest.raises(TrainingError, match=r"-\d+\.\d+ there and -\d+\.\d+ here"):
            await engine.publish(1)


async def test_an_adapter_that_is_not_applied_stops_the_run(vllm_served, tmp_path, monkeypatch):
    """Trap 17: the server answers 200 and serves the base model."""
    generate = VllmClient._generate

    async def ignoring_adapters(self, model, *rest):
        return await generate(self, BASE, *rest)

    monkeypatch.setattr(VllmClient, "_generate", ignoring_adapters)
    with pytest.raises(TrainingError, match="does not apply adapters"):
        async with opened(vllm_served, tmp_path, LORA):
            pass


async def test_raw_logprobs_stop_the_run(vllm_served, tmp_path, monkeypatch):
    """Trap 5: without the temperature, logprobs belong to another distribution."""
    next_logprobs = VllmClient.next_logprobs

    async def raw(self, model, token_ids, wanted, temperature, *rest):
        return await next_logprobs(self, model, token_ids, wanted, 1.0, *rest)

    monkeypatch.setattr(VllmClient, "next_logprobs", raw)
    with pytest.raises(TrainingError, match="another policy than the trainer"):
        async with opened(vllm_served, tmp_path):
            pass


@pytest.mark.parametrize("fault", ["keys of old weights", "an old head"])
async def test_half_a_reload_stops_the_run(vllm_served, tmp_path, base_weights, monkeypatch, fault):
    """Traps 16 and 18: the server keeps old keys and values, or its head keeps the old weights."""
    post = VllmClient._post

    async def faulty(self, path, body=None, *rest, **more):
        # If no request is running, a pause empties the cache as well.
        emptying = ("/pause", "/reset_prefix_cache", "/resume")
        if fault == "keys of old weights" and path.startswith(emptying):
            return b""
        reloads = path == "/collective_rpc" and body["method"] == "reload_policy"
        if fault == "an old head" and reloads:
            await post(self, path, body | {"method": "reload_weights"}, *rest, **more)
            return b'{"results": [{"problem": ""}]}'
        return await post(self, path, body, *rest, **more)

    async with opened(vllm_served, tmp_path) as (engine, policy):
        monkeypatch.setattr(VllmClient, "_post", faulty)
        change(policy)
        with pytest.raises(TrainingError, match="another policy than the trainer"):
            await engine.publish(1)
        monkeypatch.undo()


async def test_a_folder_without_weights_is_rejected_and_the_server_lives(vllm_served, tmp_path):
    async with VllmClient(vllm_served.url, api_key=vllm_served.key, request_timeout_s=60) as client:
        with pytest.raises(EngineError, match=r"no \*\.safetensors"):
            await client.load_weights(tmp_path, "1")
        with pytest.raises(EngineError, match="404"):
            await client.load_adapter("nobody", tmp_path / "nowhere")
        with contextlib.suppress(EngineError):
            await client.unload_adapter("nobody")
        (sampled,) = await client.generate(BASE, [1, 2, 3], {"max_tokens": 2, "seed": 1})
        assert len(sampled.token_ids) == 2
