"""Batches that are computed in several threads at once give the update of one thread."""

import threading
from dataclasses import replace

import pytest
import torch
from fakes import (
    assert_same_update,
    loss_and_gradients,
    random_samples,
    run_config,
    tiny_policy,
)

from openenv_pipe.learner import parallel_batches
from openenv_pipe.learner.parallel_batches import count_parallel, run_parallel
from openenv_pipe.learner.ranks import SINGLE_RANK, Ranks
from openenv_pipe.learner.supervised import WarmStart, with_dropout

TOKENS_PER_BATCH = 1200


@pytest.fixture
def two_at_once(monkeypatch):
    """Allow two batches at once for the few tokens of these samples."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(parallel_batches, "THREAD_TOKENS", TOKENS_PER_BATCH // 2)
    monkeypatch.setattr(parallel_batches, "MIN_TOKENS", 10)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def samples():
    return random_samples(0, count=40, max_tokens=40)


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_batches_at_once_give_the_update_of_one_thread_and_the_same_bytes_again(
    two_at_once, samples, lora_rank, kl_coef
):
    policy = tiny_policy(lora_rank=lora_rank)
    changes = {"tokens_per_batch": TOKENS_PER_BATCH, "loss.kl.coef": kl_coef}
    assert count_parallel(policy, samples, TOKENS_PER_BATCH, SINGLE_RANK) == 2
    first, again = (loss_and_gradients(policy, samples, changes) for _ in range(2))
    torch.set_num_threads(1)
    assert count_parallel(policy, samples, TOKENS_PER_BATCH, SINGLE_RANK) == 1
    assert_same_update(first, loss_and_gradients(policy, samples, changes))
    assert first[0] == again[0]
    assert all(torch.equal(one, two) for one, two in zip(first[1], again[1], strict=True))


def test_results_are_in_the_order_of_the_batches_and_are_computed_at_once(two_at_once):
    policy = tiny_policy()
    both = threading.Barrier(2)
    weight = policy.trained_parameters()[0][1]

    def work(used, number):
        if number < 2:
            both.wait(timeout=60)  # until the other thread is here
        values = used.trained_parameters()[0][1]
        (values.sum() * number).backward()
        return number, torch.get_num_threads()

    assert run_parallel(policy, 2, 5, work) == [(number, 1) for number in range(5)]
    assert torch.equal(weight.grad, torch.full_like(weight, 10.0))  # 0 + 1 + 2 + 3 + 4


def test_one_at_a_time_where_several_do_not_pay_off_or_would_change_random_numbers(
    two_at_once, samples, monkeypatch
):
    policy, budget = tiny_policy(), TOKENS_PER_BATCH
    assert count_parallel(policy, samples, budget - 1, SINGLE_RANK) == 1
    monkeypatch.setattr(
        parallel_batches, "MIN_TOKENS", 10**6
    )  # of each thread, which the samples do not have
    assert count_parallel(policy, samples, budget, SINGLE_RANK) == 1
    monkeypatch.setattr(parallel_batches, "MIN_TOKENS", 10)
    assert count_parallel(policy, [], budget, SINGLE_RANK) == 1
    assert count_parallel(policy, samples, budget, Ranks(rank=0, size=2)) == 1
    dropping = tiny_policy(lora_rank=2)
    for module in dropping.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    dropping.model.get_base_model().config.attention_dropout = 0.5
    assert count_parallel(dropping, samples, budget, SINGLE_RANK) == 2  # no dropout in GRPO
    with with_dropout(dropping):
        assert count_parallel(dropping, samples, budget, SINGLE_RANK) == 1


def test_one_at_a_time_where_a_thread_has_no_room_for_two_of_the_longest_samples(
    two_at_once, samples
):
    policy, longest = tiny_policy(), max(len(sample.token_ids) for sample in samples)
    long = [replace(sample, token_ids=sample.token_ids * 10) for sample in samples]
    assert count_parallel(policy, long, 40 * longest, SINGLE_RANK) == 2
    assert count_parallel(policy, long, 40 * longest - 1, SINGLE_RANK) == 1


def test_a_warm_start_with_batches_at_once_takes_the_step_of_one_thread(two_at_once, samples):
    trained, metrics = [], []
    for num_threads in (2, 1):
        torch.set_num_threads(num_threads)
        policy = tiny_policy()
        config = run_config({"trainer.warm_start.episodes_per_step": 40}).trainer.warm_start
        start = WarmStart(policy, config, tokens_per_batch=TOKENS_PER_BATCH, seed=0)
        metrics.append(start.step(samples))
        trained.append([values.detach() for _, values in policy.trained_parameters()])
    assert metrics[0]["loss/supervised"] == pytest.approx(metrics[1]["loss/supervised"], rel=1e-5)
    assert metrics[0]["grad/norm"] == pytest.approx(metrics[1]["grad/norm"], rel=1e-4)
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2 * config.optimizer.lr)
