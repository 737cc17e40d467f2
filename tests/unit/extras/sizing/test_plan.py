"""`plan`: numbers by hand, memory against what was measured, and the tables of its page."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import run_config

from openenv_pipe.cli import main as cli
from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.sizing.constants import CONSTANTS, GPUS, Cluster
from openenv_pipe.extras.sizing.estimate import _plans, make_plan
from openenv_pipe.extras.sizing.shapes import PUBLISHED, shape_of
from openenv_pipe.extras.sizing.text import WISHES, as_table
from openenv_pipe.models.memory_estimate import decoder_shape

ROOT = Path(__file__).parents[4]
MIB = 2**20
BASE = ("conf=wordle_qwen3", "engine=vllm", "device=cuda")
CHECKPOINTED = ("model.activation_checkpointing=true",)
# Two heads of 4 and one of keys: attention 8, keys 4. 2 layers x 2 x 10 x (8 + 4) + 3 x 10 x 20.
SMALL = decoder_shape(
    hidden_size=10,
    intermediate_size=20,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_size=4,
    vocabulary=100,
    is_tied=True,
    has_head_norms=False,
)


def cluster(num_nodes: int = 1, gpus_per_node: int = 8, gpu: str = "h100") -> Cluster:
    return Cluster(gpu=GPUS[gpu], num_nodes=num_nodes, gpus_per_node=gpus_per_node)


def on_nodes(number: int) -> tuple[str, ...]:
    return ("cluster=ray", f"cluster.learner_nodes={number}", f"trainer.devices={number}")


def test_published_shapes_have_the_published_numbers_of_parameters():
    """As their model cards count them, in billions; the embeddings count once if they are tied."""
    counts = {name: shape.num_parameters / 1e9 for name, shape in PUBLISHED.items()}
    assert {name: round(count, 2) for name, count in counts.items()} == {
        "Qwen/Qwen3-0.6B": 0.60,
        "Qwen/Qwen3-1.7B": 1.72,
        "Qwen/Qwen3-4B": 4.02,
        "Qwen/Qwen3-8B": 8.19,
        "Qwen/Qwen3-14B": 14.77,
        "Qwen/Qwen3-32B": 32.76,
        "meta-llama/Llama-3.1-8B-Instruct": 8.03,
        "meta-llama/Llama-3.3-70B-Instruct": 70.55,
    }


def test_a_small_case_by_hand():
    """One GPU of each kind: 8 episodes of 100 tokens, of which 40 are sampled."""
    words = ("trainer.tasks_per_step=2", "trainer.group_size=4", "trainer.tokens_per_batch=400")
    lengths = ("env.max_turns=4", "env.max_reply_tokens=10", "env.max_episode_tokens=100")
    whole = ("model.lora.rank=0", "model.dtype=float32", "model.autocast=bfloat16")
    config = compose([*BASE, *words, *lengths, *whole]).config
    plan = make_plan(config, SMALL, cluster(gpus_per_node=2))
    assert plan.config.trainer.devices == 1
    assert (plan.servers.num_servers, plan.servers.gpus_each) == (1, 1)
    layers = 2 * (2 * 10 * (8 + 4) + 3 * 10 * 20)
    parameters = layers + 100 * 10 + 2 * 2 * 10 + 10
    assert SMALL.num_parameters == parameters
    assert plan.publish_bytes == plan.servers.weight_bytes == 2 * parameters  # bfloat16
    assert plan.publish.seconds == pytest.approx(2 * parameters / 8.25e9)
    assert plan.servers.num_episodes == plan.num_sessions == 8
    assert plan.servers.cached_tokens == int((0.9 * 80e9 - 2 * parameters) / (2 * 4 * 2 * 2))
    # The 40 tokens of all episodes at once: 4 ms each, beside which everything else is small.
    assert plan.rollout.seconds == pytest.approx(40 * 0.004, rel=0.01)
    assert plan.num_sampled == 8 * 40
    last = 3 * 10 * 20  # the last layer's MLP, which the sampled tokens alone go through
    products = 2 * ((layers - last) * 800 + (last + 1000) * 320)
    attention = 4 * 2 * 8 * 8 * 100 * 101 // 2
    assert plan.update.seconds == pytest.approx(3 * (products + attention) / (989e12 * 0.22))
    assert plan.step_s == pytest.approx(
        plan.rollout.seconds + plan.update.seconds + plan.publish.seconds
    )
    assert plan.bottleneck == ("rollout", plan.rollout)


@pytest.mark.parametrize(("num_ranks", "states", "in_pass"), [(2, 649, 722), (4, 325, 399)])
def test_the_memory_of_ranks_is_what_was_measured(num_ranks, states, in_pass):
    """benchmarks/shard_memory.py, docs/performance.md: weights and both moments, in MiB."""
    shape = decoder_shape(
        hidden_size=768,
        intermediate_size=4 * 768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        head_size=64,
        vocabulary=261,
        is_tied=True,
        has_head_norms=True,
    )
    assert 4 * 3 * shape.num_parameters / MIB == pytest.approx(1299, rel=0.001)
    config = compose([*BASE, "model.lora.rank=0", "model.dtype=float32"]).config
    plan = next(
        each
        for each in _plans(config, shape, cluster())
        if each.config.trainer.devices == num_ranks and each.config.trainer.parallel == "fsdp"
    )
    optimizer = plan.learner_bytes["optimizer"] / MIB
    assert optimizer == pytest.approx(states * 2 / 3, rel=0.01)
    # During a pass, the weights of two layers and of the embedding are gathered beside the own.
    weights = plan.learner_bytes["weights"] / MIB
    assert weights + optimizer == pytest.approx(in_pass, rel=0.1)


def test_gpus_go_where_the_time_is():
    config = compose([*BASE, "trainer.max_staleness=1"]).config
    checkpointed = compose([*BASE, "model.activation_checkpointing=true"]).config
    large = make_plan(checkpointed, PUBLISHED["Qwen/Qwen3-32B"], cluster(2))
    assert large.fits
    assert large.servers.gpus_each == 2
    assert large.config.trainer.parallel == "fsdp"
    used = large.config.trainer.devices + large.servers.num_servers * large.servers.gpus_each
    assert used <= 16
    assert (large.config.trainer.devices, large.learner_nodes) == (8, 1)
    too_large = make_plan(config, PUBLISHED["meta-llama/Llama-3.3-70B-Instruct"], cluster())
    assert not too_large.fits
    texts = [str(row[1]) for row in as_table(too_large).rows]
    assert any("DOES NOT FIT" in text and "activation_checkpointing" in text for text in texts)
    alone = make_plan(config, PUBLISHED["Qwen/Qwen3-1.7B"], cluster(gpus_per_node=1, gpu="h200"))
    assert alone.is_shared
    parts = (alone.rollout, alone.update, alone.publish)
    assert alone.step_s == pytest.approx(sum(part.seconds for part in parts))  # they take turns


def test_a_learner_is_divided_over_machines_where_that_is_faster():
    config = compose([*BASE, "trainer.max_staleness=1", *CHECKPOINTED]).config
    large = make_plan(config, PUBLISHED["meta-llama/Llama-3.3-70B-Instruct"], cluster(8))
    assert large.fits and large.learner_nodes > 1
    assert large.config.trainer.devices == large.learner_nodes * 8
    used = large.config.trainer.devices + large.servers.num_servers * large.servers.gpus_each
    assert used <= 64
    (text,) = (str(row[1]) for row in as_table(large).rows if row[0] == "learner")
    assert f"cluster=ray cluster.learner_nodes={large.learner_nodes} trainer.parallel=fsdp" in text
    shape = PUBLISHED["Qwen/Qwen3-32B"]
    given = compose([*BASE, *CHECKPOINTED, *on_nodes(3)]).config
    assert {plan.learner_nodes for plan in _plans(given, shape, cluster(8))} == {3}
    full = compose([*BASE, *CHECKPOINTED, "model.lora.rank=0", "model.dtype=float32"]).config
    assert not make_plan(full, shape, cluster(2)).fits
    assert make_plan(full, shape, cluster(8)).fits  # which no learner of one machine does
    with pytest.raises(ConfigError, match=r"cluster\.learner_nodes=3: .*cluster\.nodes=3"):
        make_plan(given, shape, cluster(3))


def test_collectives_of_several_machines_by_hand(monkeypatch):
    """Two machines of four GPUs: three batches of each rank, weights twice and gradients."""
    words = ("trainer.tasks_per_step=6", "trainer.group_size=4", "trainer.tokens_per_batch=100")
    whole = ("model.lora.rank=0", "model.dtype=float32", "env.max_episode_tokens=100")
    config = compose([*BASE, *words, *whole, *on_nodes(2)]).config
    monkeypatch.setitem(CONSTANTS, "network", replace(CONSTANTS["network"], value=1e3))  # slow
    plans = list(_plans(config, SMALL, cluster(3, 4)))
    found = {
        (plan.config.trainer.parallel, plan.config.trainer.replicas): plan.update for plan in plans
    }
    size = 4 * SMALL.num_parameters
    expected = {("data", 1): 2 * size, ("fsdp", 1): 3 * 3 * size, ("fsdp", 2): 3 * 2 * size}
    assert {key: update.seconds for key, update in found.items()} == pytest.approx(
        {key: sent / 2 / 4 / (0.7 * 1e3) for key, sent in expected.items()}
    )
    assert {update.limit for update in found.values()} == {"network between machines"}
    often = compose([*BASE, *words, *whole, *on_nodes(2), "trainer.updates_per_step=3"]).config
    plans = _plans(often, SMALL, cluster(3, 4))
    (data,) = (plan for plan in plans if plan.config.trainer.parallel == "data")
    assert data.update.seconds == pytest.approx(3 * found["data", 1].seconds)


def test_a_reference_on_the_learner_costs_a_forward_pass():
    def seconds(*words):
        config = compose([*BASE, *words]).config
        return make_plan(config, PUBLISHED["Qwen/Qwen3-8B"], cluster(2)).update.seconds

    alone, beside = (seconds(f"trainer.loss.kl.coef={coef}") for coef in (0, 0.05))
    # Forward and backward of an adapter's model are two forward passes, and a bit for attention.
    assert 1.45 < beside / alone < 1.5
    served = [
        "trainer.loss.kl.reference=http://localhost:1/v1",
        "trainer.loss.normalise_groups=all",
    ]
    assert seconds("trainer.loss.kl.coef=0.05", *served) == pytest.approx(alone)


def test_every_bottleneck_has_its_wish():
    """No combination of GPU, model and length ends in a limit without advice."""
    for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-32B"):
        for lengths in (
            ("env.max_episode_tokens=32768", "env.max_turns=4"),
            ("env.max_episode_tokens=512",),
            ("trainer.tokens_per_batch=64", "model.lora.rank=0", "model.dtype=float32"),
        ):
            config = compose([*BASE, f"model.path={name}", *lengths]).config
            for plan in _plans(config, PUBLISHED[name], cluster(2)):
                part, limit = plan.bottleneck
                assert (part, limit.limit) in WISHES


def test_what_cannot_be_planned_is_rejected():
    with pytest.raises(ConfigError, match="add engine=vllm"):
        make_plan(run_config(), SMALL, cluster())
    with pytest.raises(ConfigError, match="Qwen/Qwen3-8B"):
        shape_of(compose([*BASE, "model.path=Nobody/Nothing"]).config.model)
    config = compose(BASE).config
    with pytest.raises(ConfigError, match="a server of this model needs 4 of these GPUs"):
        make_plan(config, PUBLISHED["meta-llama/Llama-3.3-70B-Instruct"], cluster(gpus_per_node=2))


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        (["model.activation_checkpointing=true"], 0, "bottleneck"),
        (["model.path=meta-llama/Llama-3.3-70B-Instruct"], 1, "DOES NOT FIT"),
        (["cluster.nodes=8", "gpu=h200", "cluster.gpus_per_node=4"], 0, "NVIDIA H200"),
        (["engine=local"], 2, ""),
        (["gpu=abacus"], 2, "expected one of a100"),
        (["cluster.nodes=0"], 2, "cluster.nodes=0: expected a whole number from 1 to 1000"),
        (["cluster.gpus_per_node=many"], 2, "expected a whole number from 1 to 16"),
    ],
)
def test_the_command(words, code, shown, capsys):
    ended = 0
    try:
        cli.main(["plan", *BASE[:2], *words])  # `plan` adds the device
    except SystemExit as error:
        ended = error.code
    assert ended == code
    out, error = capsys.readouterr()
    assert shown in (error if code == 2 else out)
    assert bool(out) == (code != 2)


def test_the_page_shows_these_tables(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import scaling

    page = (ROOT / "docs" / "scaling.md").read_text()
    for table in scaling.pages():
        assert table in page
