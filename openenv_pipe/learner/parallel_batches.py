"""Compute the gradients of several batches at once, each in a thread of its own.

For small models on a CPU: their operations are too short to be shared between cores, which then
wait for each other most of the time. Thread i computes the batches i, i + number of threads, and so
on. Gradients are added in the order of the threads, so that the result does not depend on which
thread is faster.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from openenv_pipe.learner.ranks import Ranks
from openenv_pipe.models.policy import Policy
from openenv_pipe.types import Sample

THREAD_TOKENS = 4096  # of `tokens_per_batch` for each thread; smaller batches take more time
MIN_TOKENS = 1024  # of an update for each thread

Result = TypeVar("Result")


def count_parallel(
    policy: Policy, samples: Sequence[Sample], tokens_per_batch: int, ranks: Ranks
) -> int:
    """Return how many batches of these samples to compute at once; 1 where more do not pay off."""
    if (
        not policy.is_small
        or ranks.size > 1
        or _has_dropout(policy)  # whose random numbers are drawn in the order of the computation
    ):
        return 1
    lengths = [len(sample.token_ids) for sample in samples]
    # A batch of one sample shares no prompt, and may be longer than the thread's budget.
    tokens_per_thread = max(THREAD_TOKENS, 2 * max(lengths, default=0))
    limits = (
        torch.get_num_threads(),
        tokens_per_batch // tokens_per_thread,
        sum(lengths) // MIN_TOKENS,
    )
    return max(1, min(limits))


def run_parallel(
    policy: Policy, num_parallel: int, num_batches: int, work: Callable[[Policy, int], Result]
) -> list[Result]:
    """Call `work` with a policy and the number of each batch; return the results in that order.

    `work` adds gradients to the policy that it is given. Afterwards all of them are in `policy`.
    """
    num_parallel = min(num_parallel, num_batches)
    if num_parallel <= 1:
        return [work(policy, number) for number in range(num_batches)]
    policies = [policy, *(policy.with_own_gradients() for _ in range(num_parallel - 1))]

    def run(thread: int) -> list[Result]:
        return [
            work(policies[thread], number) for number in range(thread, num_batches, num_parallel)
        ]

    prepare = partial(torch.set_num_threads, torch.get_num_threads() // num_parallel)
    with ThreadPoolExecutor(num_parallel, "learner", prepare) as threads:
        parts = list(threads.map(run, range(num_parallel)))
    for other in policies[1:]:
        _add_gradients(policy, other)
    return [parts[number % num_parallel][number // num_parallel] for number in range(num_batches)]


def _add_gradients(policy: Policy, other: Policy) -> None:
    pairs = zip(policy.trained_parameters(), other.trained_parameters(), strict=True)
    for (_, mine), (_, others) in pairs:
        if mine.grad is None:
            mine.grad = others.grad
        elif others.grad is not None:
            mine.grad += others.grad


def _has_dropout(policy: Policy) -> bool:
    """Return whether the model draws random numbers for dropout now."""
    layers = (m for m in policy.model.modules() if isinstance(m, torch.nn.Dropout))
    in_attention = getattr(policy.decoder.config, "attention_dropout", 0.0)
    return policy.model.training and any([in_attention, *(layer.p for layer in layers)])
