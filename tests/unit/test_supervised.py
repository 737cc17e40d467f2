"""Supervised training on scripted replies."""

import random

import pytest
import torch
from fakes import random_sample, random_samples, run_config, tiny_policy

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.learner.supervised import WarmStart


def warm_start(policy, *, tokens_per_batch=8192, **changes):
    config = run_config({f"trainer.warm_start.{key}": value for key, value in changes.items()})
    return WarmStart(policy, config.trainer.warm_start, tokens_per_batch=tokens_per_batch, seed=0)


def negative_logprob(policy, samples):
    """Return the mean negative logprob over the replies' tokens."""
    with torch.no_grad():
        return -policy.logprobs(pack(samples, share=False), 1.0)[0].mean().item()


def test_the_loss_is_the_mean_negative_logprob_of_replies():
    """Trap 8: the mean is over the replies' tokens only."""
    policy, samples = tiny_policy(), random_samples(0)
    expected = negative_logprob(policy, samples)
    metrics = warm_start(policy).step(samples)
    assert metrics["loss/supervised"] == pytest.approx(expected, rel=1e-5)
    assert metrics["tokens/trained"] == sum(sum(sample.loss_mask) for sample in samples)


def test_the_split_into_batches_changes_nothing():
    """Trap 10."""
    samples = random_samples(1)
    results = []
    for tokens_per_batch in (1, 30, 10**6):
        metrics = warm_start(tiny_policy(), tokens_per_batch=tokens_per_batch).step(samples)
        results.append((metrics["loss/supervised"], metrics["grad/norm"]))
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert results[0] == pytest.approx(results[2], rel=1e-5)


def test_replies_are_learnt():
    policy = tiny_policy()
    samples = [random_sample(random.Random(0), [(3, 4), (2, 4)])]
    before = negative_logprob(policy, samples)
    stage = warm_start(policy, **{"optimizer.lr": 1e-2, "optimizer.lr_warmup_steps": 0})
    for _ in range(10):
        stage.step(samples)
    assert negative_logprob(policy, samples) < before / 2


@pytest.mark.parametrize(("count", "size"), [(6, 2), (7, 3), (5, 5), (3, 8), (1, 1)])
def test_every_sample_is_seen_before_any_comes_again(count, size):
    policy = tiny_policy()
    stage = warm_start(policy, episodes_per_step=size)
    samples = [random_sample(random.Random(index), [(1, 1)]) for index in range(count)]
    seen = []
    logprobs = policy.logprobs

    def watch(batch, temperature):
        given = batch.token_ids[batch.predictors][batch.places].tolist()
        seen.extend(zip(given, batch.targets[batch.places].tolist(), strict=True))
        return logprobs(batch, temperature)

    policy.logprobs = watch
    for _ in range(3 * count):
        stage.step(samples)
    everything = {tuple(sample.token_ids) for sample in samples}
    for start in range(0, len(seen) - count + 1, count):
        assert set(seen[start : start + count]) == everything


def test_equal_warm_starts_are_equal_to_the_bit():
    weights = []
    for _ in range(2):
        policy = tiny_policy()
        stage = warm_start(policy, episodes_per_step=2)
        for _ in range(4):
            stage.step(random_samples(2))
        weights.append([parameter.detach() for parameter in policy.model.parameters()])
    assert all(map(torch.equal, *weights))
