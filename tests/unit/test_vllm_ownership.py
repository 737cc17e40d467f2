"""Several runs at one vLLM server: whose it is, and what each of them may train on."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.engines import TokenRequest
from openenv_pipe.engines.vllm import ownership
from openenv_pipe.engines.vllm.inside.openenv_pipe_claims import Claims
from openenv_pipe.engines.vllm.launch import AttachedVllmServer
from openenv_pipe.engines.vllm.ownership import Owner
from openenv_pipe.errors import ConfigError, EngineError
from tests.small_vllm import TOKENS, SmallServer, run_engine

pytestmark = pytest.mark.slow

WAYS = ("adapter", "full")
OTHER = Owner.new("runs/other/0007")


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(ownership, "RENEW_EVERY_S", 0.05)
    monkeypatch.setattr(ownership, "POLL_S", 0.02)


@pytest.fixture
async def server(tmp_path):
    server = SmallServer(tmp_path / "engine.log")
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def run_at(server, folder, way, *, name="runs/ours/0001", **options):
    """Run an engine that is attached to the server, as the run `name`."""
    given = ("engine.launch=attach", f"engine.url={server.url}", "engine.max_restarts=1")
    small = ("conf=smoke", "engine=vllm", "env.max_episode_tokens=64")
    config = compose([*small, *given]).config.engine
    root, servers = folder / name.replace("/", "-"), [AttachedVllmServer(server.url, config)]
    async with run_engine(config, servers, root, way, name=name, **options) as (engine, *more):
        engine.source, engine.told = more
        yield engine


def request(episode=0):
    return TokenRequest(
        episode=episode, turn=0, prompt_ids=[1], max_tokens=2, temperature=1.0, seed=1
    )


async def sample(engine, episode=0):
    completion = await engine.generate(request(episode))
    assert completion.token_ids == TOKENS
    return completion.policy_versions


@pytest.mark.parametrize(
    ("first", "second"), [("full", "full"), ("full", "adapter"), ("adapter", "full")]
)
async def test_a_run_that_would_change_what_another_samples_is_rejected(
    server, tmp_path, first, second
):
    async with run_at(server, tmp_path, first) as engine:
        server.is_paused = True  # as while the first replaces the weights
        with pytest.raises(ConfigError, match=r"in use by another run: 'runs/ours/0001 \(process"):
            async with run_at(server, tmp_path, second, name="runs/late/0002", value=0.75):
                pass
        assert server.is_paused  # the rejected run has not even resumed it
        server.is_paused = False
        await engine.publish(1)
        assert await sample(engine) == [1]


async def test_runs_that_publish_adapters_share_a_server(server, tmp_path):
    async with (
        run_at(server, tmp_path, "adapter", name="runs/a/0001") as one,
        run_at(server, tmp_path, "adapter", name="runs/b/0001", value=0.75) as two,
    ):
        await two.publish(4)
        assert (await sample(one), await sample(two)) == ([0], [4])
        models = [each.replicas[0].model for each in (one, two)]
        assert [server.values[model] for model in models] == [0.25, 0.75]


async def test_a_run_that_puts_a_server_to_sleep_has_it_alone(server, tmp_path):
    async with run_at(server, tmp_path, "adapter"):
        with pytest.raises(ConfigError, match="in use by another run"):
            async with run_at(server, tmp_path, "adapter", name="runs/late/0002", sleep_level=1):
                pass
    assert "/sleep" not in " ".join(server.calls)


async def test_a_server_is_free_when_its_run_has_ended(server, tmp_path):
    for name in ("runs/a/0001", "runs/b/0001"):
        async with run_at(server, tmp_path, "full", name=name) as engine:
            assert await sample(engine) == [0]
            assert not any("is claimed" in text for text in engine.told)


# The ids are given, because a label differs between the processes that collect the tests.
@pytest.mark.parametrize(
    ("way", "left"),
    [("adapter", "default"), ("full", OTHER.label(3))],
    ids=["adapter", "full"],
)
async def test_the_claim_of_a_dead_run_is_taken_over(server, tmp_path, way, left):
    now = 0.0

    def notify(text):
        nonlocal now
        if "is claimed by 'runs/dead/0001'" in text:
            now = ownership.LEASE_S  # time passes once the claim has been seen

    server.claims = Claims(lambda: now)
    server.claims.claim("dead", "runs/dead/0001", True, ownership.LEASE_S)
    server.version = left  # the label of the weights that it has left
    async with run_at(server, tmp_path, way, notify=notify) as engine:
        assert await sample(engine) == [0]
    assert now


async def test_no_adapter_is_added_to_the_weights_that_an_ended_run_has_left(server, tmp_path):
    """It may have moved them by less than the logprob check notices, as here by nothing."""
    server.version = OTHER.label(12)
    named = "engine.url.*another run: 'runs/other/0007.*version 12; expected.*restart the server"
    with pytest.raises(ConfigError, match=named):
        async with run_at(server, tmp_path, "adapter"):
            pass
    assert "/v1/load_lora_adapter" not in server.calls


@pytest.mark.parametrize("deed", ["publish", "wait"])
async def test_a_run_whose_server_was_taken_over_ends_and_names_the_other(server, tmp_path, deed):
    """It did not answer for longer than its lease, such as a process that was stopped."""
    with pytest.raises(EngineError, match="was taken over by another run: 'runs/other/0007"):
        async with run_at(server, tmp_path, "full") as engine:
            server.claims = Claims()
            server.claims.claim(OTHER.id, OTHER.name, True, 3600.0)
            if deed == "publish":
                await engine.publish(1)
            else:
                while engine.replicas[0].failure is None:
                    await asyncio.sleep(0.01)
                await sample(engine)
    assert "/pause" not in server.calls[-2:]  # the other's server was left alone


@pytest.mark.parametrize("way", WAYS)
async def test_tokens_of_another_run_s_weights_are_never_used(server, tmp_path, way):
    """Whatever was claimed: the label of each token decides."""
    named = "has the weights of another run: 'runs/other/0007.*version 12.*Nothing that it sampled"
    async with run_at(server, tmp_path, way) as engine:
        own = server.version
        server.version = OTHER.label(12)
        with pytest.raises(EngineError, match=named):
            await sample(engine)
        server.version = own

        def second_half(answer):
            (choice,) = answer["choices"]
            half = [{"version": own, "start": 0, "end": 1}]
            choice["weight_versions"] = [*half, {"version": OTHER.label(12), "start": 1, "end": 2}]

        server.spoil = second_half
        with pytest.raises(EngineError, match=named):
            await sample(engine, episode=1)


async def test_tokens_of_two_versions_of_the_run_s_own_are_its_own(server, tmp_path):
    async with run_at(server, tmp_path, "full") as engine:
        await engine.publish(1)

        def halves(answer):
            owner = engine.replicas[0]._versions.owner
            spans = [(owner.label(version), version) for version in (0, 1)]
            answer["choices"][0]["weight_versions"] = [
                {"version": label, "start": n, "end": n + 1} for label, n in spans
            ]

        server.spoil = halves
        assert await sample(engine) == [0, 1]


async def restarted(server, _):
    """Restart the server between two looks of its replica: it has its first weights again."""
    server.values, server.version, server.claims = {"base": 0.0}, "default", Claims()


async def unloaded(server, engine):
    """Remove the adapter, as another program or vLLM itself may do."""
    server.values.pop(engine.replicas[0].model, None)


@pytest.mark.parametrize(
    ("way", "event"),
    [("full", restarted), ("adapter", restarted), ("adapter", unloaded)],
)
async def test_a_server_that_has_lost_the_policy_gets_it_again(server, tmp_path, way, event):
    async with run_at(server, tmp_path, way) as engine:
        engine.source.value = 0.5
        await engine.publish(1)
        await event(server, engine)
        assert await sample(engine) == [1]
        assert server.values[engine.replicas[0].model] == 0.5
        assert any("has lost the policy" in text for text in engine.told)
        assert engine.replicas[0].num_restarts == 1


async def test_a_server_that_loses_the_policy_again_and_again_ends_the_run(server, tmp_path):
    async with run_at(server, tmp_path, "adapter") as engine:
        with pytest.raises(EngineError, match="max_restarts=1 are used up"):
            for episode in range(3):
                await unloaded(server, engine)
                await sample(engine, episode)


async def test_an_adapter_of_the_same_name_from_elsewhere_is_not_taken_for_ours(server, tmp_path):
    async with run_at(server, tmp_path, "adapter") as engine:
        model = engine.replicas[0].model
        await engine.replicas[0].send(engine.replicas[0]._serving)  # repeating it does no harm
        server.roots[model] = "/somewhere/else"
        with pytest.raises(EngineError, match="another adapter under the name"):
            await engine.replicas[0].send(engine.replicas[0]._serving)


async def test_a_server_whose_weights_nobody_can_replace_needs_no_claim(server, tmp_path):
    server.has_development_mode = False
    async with run_at(server, tmp_path, "adapter") as engine:
        assert await sample(engine) == [0]


def test_claims():
    now = 100.0
    claims = Claims(lambda: now)
    granted = {"holder": "", "silent_s": 0.0}
    assert claims.claim("a", "A", True, 30.0) == {**granted, "is_new": True}
    now = 105.0
    held = {"holder": "A", "silent_s": 5.0, "is_new": False}
    assert claims.claim("b", "B", True, 30.0) == held
    assert claims.claim("b", "B", False, 30.0) == held
    now = 200.0  # a claim that nobody has asked for meanwhile is still known
    assert claims.claim("a", "A", True, 30.0) == {**granted, "is_new": False}
    now = 230.0
    assert claims.claim("b", "B", False, 30.0) == {**granted, "is_new": True}
    assert claims.claim("c", "C", False, 30.0)["holder"] == ""
    assert claims.claim("a", "A", True, 30.0)["holder"] == "B"
    claims.release("b")
    claims.release("nobody")
    assert claims.claim("a", "A", True, 30.0)["holder"] == "C"


@pytest.mark.parametrize("name", ["runs/a/0001", "", "a:b\nc", "runs/é"])
def test_labels_are_read_as_they_were_written(name):
    owner = Owner.new(name)
    assert owner.version(owner.label(12), "http://a") == 12
    with pytest.raises(EngineError, match="another run"):
        OTHER.version(owner.label(12), "http://a")


def test_no_two_runs_have_the_same_identity():
    assert len({Owner.new("runs/a/0001").id for _ in range(100)}) == 100
