"""Which numbers change an update, and which must not. Trap numbers: tests/README.md."""

import dataclasses
import gc
import math
import random

import pytest
import torch
from fakes import (
    FakeHost,
    GradientKeeper,
    alike_samples,
    all_episodes,
    assert_same_update,
    collect,
    local_engine,
    loss_and_gradients,
    plain_sample,
    random_sample,
    random_samples,
    run_config,
    tiny_policy,
    trained_tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv_pipe.algorithms.advantages import step_advantages
from openenv_pipe.algorithms.losses.normalization import Uncomputed
from openenv_pipe.algorithms.packing import pack, prefix_reuse_fraction
from openenv_pipe.algorithms.samples import build_samples, few_samples
from openenv_pipe.config.compose import compose
from openenv_pipe.errors import TrainingError
from openenv_pipe.learner import batches
from openenv_pipe.learner import batches as batches_module
from openenv_pipe.learner.learner import NOTHING, Learner
from openenv_pipe.learner.optimizer import Optimizer, rate_share
from openenv_pipe.models.forward import logprobs as logprobs_module

LOSSES = [  # pairs of type and normaliser
    ("grpo", "sample"),
    ("grpo", "token"),
    ("grpo", "constant"),
    ("gspo", "sample"),
    ("cispo", "token"),
]
FEW = settings(derandomize=True, deadline=None, max_examples=6)
SEEDS = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


def named(loss):
    return {"loss.type": loss[0], "loss.normalise": loss[1]}


def learner_of(policy, **changes):
    trainer = run_config({f"trainer.{key}": value for key, value in changes.items()}).trainer
    return Learner(policy, trainer, max_episode_tokens=120, seed=0)


def weights_of(policy):
    return [parameter.detach().clone() for parameter in policy.model.parameters()]


def unmasked(values, mask, fill):
    """Return the values with `fill` wherever the mask is False."""
    return [value if chosen else fill for value, chosen in zip(values, mask, strict=True)]


@pytest.mark.parametrize("normaliser", ["sample", "token", "constant"])
def test_every_update_of_a_step_counts_its_share_of_what_is_not_computed(normaliser):
    """Trap 9: as many episodes and tokens without an advantage halve each of the gradients."""
    policy, samples = tiny_policy(), random_samples(5, 6)
    num_tokens = sum(sum(sample.loss_mask) for sample in samples)
    found = []
    for uncomputed in (NOTHING, Uncomputed(num_episodes=len(samples), num_tokens=num_tokens)):
        learner = learner_of(policy, updates_per_step=2, **{"loss.normalise": normaliser})
        learner.optimizer = keeper = GradientKeeper(policy)
        learner.update(samples, 1, uncomputed)
        found.append(keeper.updates)
    for alone, counted in zip(*found, strict=True):
        assert all(map(torch.allclose, [each / 2 for each in alone], counted))


# --- traps 8 to 11: what must not change an update -----------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("logprob", "advantage"), [(1e30, 1e30), (-3.0, math.nan)])
def test_numbers_at_masked_positions_change_nothing(policy, loss, logprob, advantage):
    """Traps 8 and 11: loss and gradients stay equal to the bit."""
    samples = random_samples(1)
    touched = [
        dataclasses.replace(
            sample,
            logprobs=unmasked(sample.logprobs, sample.loss_mask, logprob),
            advantages=unmasked(sample.advantages, sample.loss_mask, advantage),
        )
        for sample in samples
    ]
    changes = named(loss)
    expected = loss_and_gradients(policy, samples, changes)
    seen = loss_and_gradients(policy, touched, changes)
    assert seen[0] == expected[0]
    assert all(map(torch.equal, seen[1], expected[1]))


@pytest.mark.parametrize("loss", LOSSES)
def test_no_gradient_comes_from_positions_before_tokens_of_the_environment(loss):
    """Trap 8: the gradient is exactly zero at hidden states whose next token the model did not
    choose."""
    policy, seen = tiny_policy(), []

    def row_hidden(batch):
        leaf = type(policy).row_hidden(policy, batch).detach().requires_grad_()
        seen.append((batch, leaf))
        return leaf

    policy.row_hidden = row_hidden
    samples = random_samples(2)
    no_clip = {"loss.clip_low": 1e9, "loss.clip_high": 1e9}
    learner = learner_of(policy, **named(loss) | no_clip)
    learner.optimizer.step = lambda: 0.0
    learner.update(samples, step=1)
    ((batch, leaf),) = seen
    next_chosen = predicts(batch)
    assert 0 < next_chosen.sum() < len(next_chosen)
    assert (leaf.grad[~next_chosen] == 0).all()
    assert (leaf.grad[next_chosen].abs().sum(dim=-1) > 0).all()


def predicts(batch):
    """Return True for each position of a row whose next token is trained."""
    found = torch.zeros(len(batch.token_ids), dtype=torch.bool)
    found[batch.predictors] = True
    return found


def test_nan_at_masked_positions_does_not_leak():
    """Trap 11: NaN in hidden states at masked positions changes neither loss nor gradients."""
    policy = tiny_policy()
    batch = pack(random_samples(3), share=False)

    def gradients():
        logprobs, entropies = policy.logprobs(batch, 0.7)
        logprobs.sum().backward()
        found = [parameter.grad.clone() for parameter in trained_tensors(policy)]
        policy.model.zero_grad()
        return [logprobs.detach(), entropies, *found]

    expected = gradients()
    policy.row_hidden = lambda batch: torch.where(
        predicts(batch)[:, None], type(policy).row_hidden(policy, batch), torch.nan
    )
    for seen, value in zip(gradients(), expected, strict=True):
        assert torch.equal(seen, value)


@pytest.mark.parametrize("loss", LOSSES)
@FEW
@given(seed=SEEDS, extra=st.integers(1, 20))
def test_more_environment_tokens_or_padding_leave_the_update_unchanged(policy, loss, seed, extra):
    """Trap 9: tokens after the last reply, and with them wider batches, change nothing."""
    samples, changes = random_samples(seed, count=4), named(loss)
    expected = loss_and_gradients(policy, samples, changes)
    longer = samples[seed % 4]
    longer.token_ids = longer.token_ids + [9] * extra
    longer.loss_mask = longer.loss_mask + [False] * extra
    longer.logprobs = longer.logprobs + [0.0] * extra
    longer.advantages = longer.advantages + [0.0] * extra
    assert_same_update(loss_and_gradients(policy, samples, changes), expected)


@pytest.mark.parametrize("loss", LOSSES)
@FEW
@given(seed=SEEDS, shape=st.tuples(st.integers(1, 12), st.integers(1, 9)))
def test_the_split_into_batches_leaves_the_update_unchanged(policy, loss, seed, shape):
    """Trap 10: batches of one row, two, eight or all rows, and another order, change nothing."""
    count, max_tokens = shape
    samples = random_samples(seed, count=count, max_tokens=max_tokens)
    longest = max(len(sample.token_ids) for sample in samples)
    results = [
        loss_and_gradients(policy, samples, named(loss) | {"tokens_per_batch": tokens_per_batch})
        for tokens_per_batch in (1, 2 * longest, 8 * longest, 10**6)
    ]
    results.append(loss_and_gradients(policy, samples[::-1], named(loss)))
    for result in results[1:]:
        assert_same_update(result, results[0])


@pytest.mark.parametrize("loss", LOSSES)
@FEW
@given(seed=SEEDS, max_tokens=st.integers(2, 40))
def test_what_samples_share_is_computed_once_and_counts_for_each(policy, loss, seed, max_tokens):
    """Trap 25: the loss and gradients equal those of computing every sample's tokens separately.

    Some of the samples share trained tokens, and one sample occurs twice.
    """
    samples = alike_samples(seed, max_tokens=max_tokens)
    assert prefix_reuse_fraction(samples) > batches_module.MIN_REUSE_FRACTION
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches_module, "MIN_REUSE_FRACTION", 1.0)
        expected = loss_and_gradients(policy, samples, named(loss))
    for tokens_per_batch in (10**6, 3 * max_tokens):
        changes = named(loss) | {"tokens_per_batch": tokens_per_batch}
        assert_same_update(loss_and_gradients(policy, samples, changes), expected)


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_the_split_into_batches_leaves_the_kl_part_unchanged(kl_coef):
    """Trap 10."""
    policy = tiny_policy(lora_rank=2)
    move(policy)
    samples = random_samples(5)
    results = [
        loss_and_gradients(policy, samples, {"loss.kl.coef": kl_coef, "tokens_per_batch": tokens})
        for tokens in (1, 10**6)
    ]
    assert_same_update(*results)


def move(policy):
    """Change all trained weights, also those of adapters that start at zero."""
    generator = torch.Generator().manual_seed(0)
    for parameter in trained_tensors(policy):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def test_chunks_of_the_head_change_nothing(monkeypatch):
    """Trap 10: the head computes fifty vocabulary entries at a time, and again in the backward
    pass."""
    policy, samples = tiny_policy(), random_samples(6)
    changes = {"temperature": 0.7}
    expected = loss_and_gradients(policy, samples, changes)
    monkeypatch.setattr(logprobs_module, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(logprobs_module, "MIN_COLUMNS", 50)
    monkeypatch.setattr(logprobs_module, "KEPT_ELEMENTS", 0)
    assert_same_update(loss_and_gradients(policy, samples, changes), expected)


# --- what must change an update ------------------------------------------------------------------


def test_a_good_reply_becomes_more_likely_and_a_bad_one_less():
    policy = tiny_policy()
    samples = [random_sample(random.Random(seed), [(3, 3), (2, 3)]) for seed in (0, 1)]
    for sample, advantage in zip(samples, (1.0, -1.0), strict=True):
        sample.advantages = [advantage * chosen for chosen in sample.loss_mask]
    before = [logprob_of(policy, sample) for sample in samples]
    for sample, logprobs in zip(samples, before, strict=True):
        place = iter(logprobs.tolist())
        sample.logprobs = [next(place) if chosen else 0.0 for chosen in sample.loss_mask]
    learner_of(policy, **{"optimizer.lr": 1e-3}).update(samples, step=1)
    after = [logprob_of(policy, sample) for sample in samples]
    assert after[0].sum() > before[0].sum()
    assert after[1].sum() < before[1].sum()


@torch.no_grad()
def logprob_of(policy, sample):
    return policy.logprobs(pack([sample], share=False), 1.0)[0]


@pytest.mark.parametrize("loss", LOSSES)
def test_the_temperature_is_the_samplers(policy, loss):
    """Trap 4: at another temperature the ratio is not 1, and the loss differs."""
    samples, changes = random_samples(7), named(loss)
    one = loss_and_gradients(policy, samples, changes | {"temperature": 1.0})
    other = loss_and_gradients(policy, samples, changes | {"temperature": 1.3})
    assert one[0] != pytest.approx(other[0], rel=1e-3)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
async def test_on_policy_nothing_is_clipped_and_nothing_differs(temperature):
    """Trap 4: the first update uses the same weights as the sampler."""
    policy = tiny_policy(ends=True)
    groups = await collect(policy, temperature=temperature)
    samples = [plain_sample(episode) for episode in all_episodes(groups)]
    metrics = learner_of(policy, temperature=temperature).update(samples, step=1)
    assert metrics["mismatch/max"] < 1e-5
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["clip/share"] == 0.0
    assert metrics["loss/policy"] == pytest.approx(-1.0, abs=1e-5)
    assert metrics["tokens/trained"] == sum(e.num_completion_tokens for e in all_episodes(groups))


def test_metrics_on_samples_by_hand(policy):
    """Metrics are means over trained tokens, whatever the batches."""
    samples = random_samples(8)
    batch = pack(samples, share=False)
    with torch.no_grad():
        logprobs, entropies = policy.logprobs(batch, 1.0)
    gaps = (logprobs - batch.logprobs).abs()
    learner = learner_of(policy, tokens_per_batch=20)
    learner.optimizer.step = lambda: 0.25
    metrics = learner.update(samples, step=1)
    policy.model.zero_grad()
    assert metrics["mismatch/mean"] == pytest.approx(gaps.mean().item(), rel=1e-4)
    assert metrics["mismatch/max"] == pytest.approx(gaps.max().item(), rel=1e-4)
    assert metrics["loss/entropy"] == pytest.approx(entropies.mean().item(), rel=1e-4)
    assert metrics["grad/norm"] == 0.25
    assert metrics["loss/kl"] == 0.0


def test_every_sample_is_packed_once_also_where_start_logprobs_are_needed(monkeypatch):
    packed = []

    def count(samples, **options):
        packed.extend(map(id, samples))
        return pack(samples, **options)

    monkeypatch.setattr(batches, "pack", count)
    samples = [sample for sample in random_samples(0, 6) if any(sample.loss_mask)]
    correction = {"loss.correction.type": "truncate"}
    learner_of(tiny_policy(), updates_per_step=3, **correction).update(samples, step=1)
    assert sorted(packed) == sorted(map(id, samples))


def watched(policy):
    """Return the list of the batches whose logprobs are computed from now on."""
    seen, logprobs = [], policy.predicted_logprobs

    def watch(batch, temperature, **options):
        seen.append(batch)
        return logprobs(batch, temperature, **options)

    policy.predicted_logprobs = watch
    return seen


def test_several_updates_per_step_share_the_samples_out():
    """Each sample is used once; later updates are off policy, and their ratios are clipped."""
    policy = tiny_policy()
    learner = learner_of(policy, updates_per_step=3, **{"optimizer.lr": 1e-2})
    seen = watched(policy)
    samples = random_samples(9, count=7)
    metrics = learner.update(samples, step=1)
    assert [len(batch.samples) for batch in seen] == [3, 2, 2]
    assert metrics["tokens/trained"] == sum(sum(sample.loss_mask) for sample in samples)
    assert learner.optimizer.num_steps_taken == 3


@pytest.mark.parametrize("correction", ["none", "truncate"])
def test_several_passes_train_on_the_same_updates_again(correction):
    """What is recorded of a token, and the number of tokens, are those of the first pass."""
    samples = random_samples(9, count=7)

    def train(num_passes):
        policy = tiny_policy()
        changes = {"loss.correction.type": correction, "optimizer.lr": 1e-2}
        learner = learner_of(policy, passes_per_step=num_passes, updates_per_step=2, **changes)
        seen = watched(policy)
        metrics = learner.update(samples, step=4)
        assert learner.optimizer.num_steps_taken == 4 * 2 * num_passes
        return metrics, learner.trained_tokens, seen

    once, tokens, _ = train(1)
    thrice, same_tokens, seen = train(3)
    seen = [*map(id, seen)]
    assert seen[-6:] == 3 * seen[-2:] and len(set(seen)) == 2
    for name in ("tokens/trained", "mismatch/max", "advantage/max"):
        assert thrice[name] == pytest.approx(once[name], rel=1e-5)
    assert thrice["ratio/max"] > once["ratio/max"]
    if correction != "none":  # The sampler's logprobs are made up, so that all are clipped at once.
        assert thrice["clip/share"] > once["clip/share"]
    for mine, others in zip(tokens, same_tokens, strict=True):
        assert (mine.entropy == others.entropy).all()
        assert mine.mismatch == pytest.approx(others.mismatch, abs=4e-3, nan_ok=True)


async def test_the_distance_from_the_sampler_is_k1_over_a_few_samples_of_every_group():
    """It is 0 for the policy that has sampled, and changes nothing."""
    policy = tiny_policy(ends=True)
    groups = await collect(policy)
    samples = few_samples(groups, num_tokens=1)
    assert [(each.group, each.member) for each in samples] == [(groups[0].id, 0)]
    samples = few_samples(groups, num_tokens=10**6)
    assert [each.member for each in samples] == sorted(each.member for each in samples)
    assert len(samples) == sum(len(group.episodes) for group in groups)
    learner = learner_of(policy, tokens_per_batch=64)
    assert abs(learner.kl_from_sampler(samples)) < 1e-5
    for parameter in policy.model.parameters():
        parameter.data *= 1.5
    before = weights_of(policy)
    with torch.no_grad():
        batch = pack(samples, share=False)
        expected = (batch.logprobs - policy.logprobs(batch, 1.0)[0]).mean().item()
    assert learner.kl_from_sampler(samples) == pytest.approx(expected, rel=1e-4)
    assert expected > 0.01
    assert all(map(torch.equal, weights_of(policy), before))


# --- what is rejected ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_sampled_logprobs_that_are_not_finite_are_counted_and_rejected(value):
    """Trap 7: the weights stay as they are."""
    policy, samples = tiny_policy(), random_samples(10)
    before = weights_of(policy)
    samples[2].logprobs[-1] = samples[4].logprobs[-1] = value
    total = sum(len(sample.logprobs) for sample in samples)
    with pytest.raises(TrainingError, match=f"2 of {total} "):
        learner_of(policy).update(samples, step=1)
    assert all(map(torch.equal, weights_of(policy), before))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_rejected_and_harms_no_weight(value):
    """Trap 7. The model is left in eval mode by an update, also by one that fails."""
    policy, samples = tiny_policy(), random_samples(11)
    learner_of(policy).update(samples, step=1)
    assert not policy.model.training
    before = weights_of(policy)
    samples[0].advantages[-1] = value
    with pytest.raises(TrainingError, match="norm is"):
        learner_of(policy).update(samples, step=2)
    assert all(map(torch.equal, weights_of(policy), before))
    assert not policy.model.training


# --- the optimizer ------------------------------------------------------------------------------


def schedule(name, num_steps=10, **changes):
    changes = {"lr_warmup_steps": 2, "final_lr_share": 0.1} | changes | {"schedule": name}
    config = run_config({f"trainer.optimizer.{key}": value for key, value in changes.items()})
    return [rate_share(config.trainer.optimizer, step, num_steps) for step in range(num_steps + 3)]


def test_learning_rates_of_the_schedules():
    """The warm-up never starts at zero; the decay ends at its final share and stays there."""
    assert schedule("constant") == pytest.approx([1 / 3, 2 / 3] + [1.0] * 11)
    # the tenth and last step has the final share
    linear = [1 - 0.9 * step / 7 for step in range(8)]
    assert schedule("linear") == pytest.approx([1 / 3, 2 / 3, *linear, 0.1, 0.1, 0.1])
    cosine = [0.1 + 0.45 * (1 + math.cos(math.pi * step / 7)) for step in range(8)]
    assert schedule("cosine") == pytest.approx([1 / 3, 2 / 3, *cosine, 0.1, 0.1, 0.1])


@pytest.mark.parametrize(("name", "last"), [("constant", 1.0), ("linear", 0.0), ("cosine", 0.0)])
def test_a_schedule_decays_by_default(name, last):
    """A schedule that is named acts, whatever the other keys of the shipped optimizer are."""
    config = compose(["conf=smoke", f"trainer.optimizer.schedule={name}"]).config.trainer.optimizer
    assert config.final_lr_share is None
    rates = [rate_share(config, step, 10) for step in range(10)]
    assert (rates[0], rates[-1]) == pytest.approx((1.0, last), abs=1e-12)
    assert rates == sorted(rates, reverse=True)


def test_steps_without_samples_do_not_hold_the_schedule_back():
    """No group of steps 2 and 3 had a signal: the last step still has the last rate."""
    changes = {"steps": 4, "optimizer.schedule": "linear", "optimizer.lr": 1e-3}
    learner, samples = learner_of(tiny_policy(), **changes), random_samples(0)
    assert learner.update(samples, step=1)["lr"] == 1e-3
    assert learner.update(samples, step=4)["lr"] == 0.0


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_an_optimizer_step_moves_every_weight_and_clears_the_gradients(kind):
    policy = tiny_policy()
    config = run_config({"trainer.optimizer.type": kind}).trainer.optimizer
    optimizer = Optimizer(policy.trained_parameters(), config, 10, precision=torch.float32)
    before = weights_of(policy)
    for parameter in trained_tensors(policy):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    norm = torch.cat([p.grad.flatten() for p in trained_tensors(policy)]).norm().item()
    assert optimizer.step() == pytest.approx(norm, rel=1e-4)
    assert not any(map(torch.equal, weights_of(policy), before))
    assert all(parameter.grad is None for parameter in trained_tensors(policy))


# --- determinism --------------------------------------------------------------------------------


async def train_step(engine, learner, step, **options):
    """Play the episodes of a step, update the policy, and publish it."""
    groups = await collect(
        learner.policy, engine=engine, group_size=3, label=f"step {step}", **options
    )
    advantages = step_advantages(groups, baseline="group", scale="group", discount=1.0)
    learner.update(build_samples(advantages), step)
    await engine.publish(step)


async def train_a_little(*, order, lora_rank, updates_per_step, autocast):
    """Train three steps (collect, advantages, update, publish) and return all weights."""
    policy = tiny_policy(ends=True, lora_rank=lora_rank, autocast=autocast)
    engine = local_engine(policy)
    learner = learner_of(
        policy,
        updates_per_step=updates_per_step,
        temperature=0.9,
        **{"optimizer.lr": 1e-2, "loss.kl.coef": 0.01},
    )
    host = FakeHost(order=random.Random(order), capacity=6)
    for step in (1, 2, 3):
        await train_step(engine, learner, step, host=host, temperature=0.9)
    return weights_of(policy)


@pytest.mark.parametrize(
    ("lora_rank", "updates_per_step", "autocast"),
    [(0, 1, "float32"), (2, 2, "float32"), (0, 2, "bfloat16")],
)
async def test_equal_trainings_are_equal_to_the_bit(lora_rank, updates_per_step, autocast):
    """The environments' answers come in another order in each training."""
    options = {
        "lora_rank": lora_rank,
        "updates_per_step": updates_per_step,
        "autocast": autocast,
    }
    first = await train_a_little(order=1, **options)
    second = await train_a_little(order=2, **options)
    assert all(map(torch.equal, first, second))
    untrained = weights_of(tiny_policy(ends=True, lora_rank=lora_rank))
    assert not all(map(torch.equal, first, untrained))


async def test_steps_leave_no_tensors_in_reference_cycles():
    """Such tensors would fill the memory until Python's garbage collector finds them."""
    policy = tiny_policy(ends=True)
    engine, learner, counts = local_engine(policy), learner_of(policy), []
    gc.collect()
    gc.disable()
    try:
        for step in range(1, 5):
            await train_step(engine, learner, step)
            counts.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
    finally:
        gc.enable()
    assert len(set(counts[1:])) == 1, counts  # the first step makes the optimizer's state
