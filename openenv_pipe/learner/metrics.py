"""Compute the learner's metrics of a step from the accumulated sums.

Their names are stable; docs/metrics.md explains each.
"""

import math
from collections.abc import Sequence

from openenv_pipe.learner.accumulator import MetricAccumulator


def step_metrics(
    accumulator: MetricAccumulator, gradient_norms: Sequence[float], lr: float, num_passes: int = 1
) -> dict[str, float]:
    """Return means over trained tokens, means of losses over updates, and the largest norm.

    num_passes: how often each token was added
    """
    num_updates, num_tokens = len(gradient_norms), accumulator.sum("num_tokens")

    def mean(name: str) -> float:
        return accumulator.sum(name) / num_tokens

    advantage = mean("advantage")
    metrics = {
        "loss/total": accumulator.sum("loss") / num_updates,
        "loss/policy": accumulator.sum("policy_loss") / num_updates,
        "loss/kl": mean("kl"),
        "loss/entropy": mean("entropy"),
        "clip/share": (accumulator.sum("clipped_low") + accumulator.sum("clipped_high"))
        / num_tokens,
        "clip/low": mean("clipped_low"),
        "clip/high": mean("clipped_high"),
        "ratio/max": accumulator.max("ratio"),
        "ratio/min": -accumulator.max("negative_ratio"),
        "advantage/mean": advantage,
        "advantage/std": math.sqrt(max(0.0, mean("advantage_square") - advantage**2)),
        "advantage/max": accumulator.max("advantage"),
        "advantage/min": -accumulator.max("negative_advantage"),
        "grad/norm": max(gradient_norms),
        "lr": lr,
        "tokens/trained": int(num_tokens) // num_passes,
        "tokens/computed": int(accumulator.sum("num_computed")),
    }
    if accumulator.has("router_balance"):
        metrics["loss/router_balance"] = mean("router_balance")
    if accumulator.has("off_policy"):
        metrics["clip/off_policy"] = mean("off_policy")
    if accumulator.has("num_echo"):
        num_echo = accumulator.sum("num_echo")
        metrics["loss/echo"] = accumulator.sum("echo") / num_echo
        metrics["tokens/echo"] = int(num_echo) // num_passes
    if accumulator.has("num_replay"):
        num_replay = accumulator.sum("num_replay")
        metrics["loss/replay"] = accumulator.sum("replay") / num_replay
        metrics["tokens/replay"] = int(num_replay) // num_passes
    metrics |= _mismatch(accumulator)
    if accumulator.has("correction"):
        metrics["correction/mean"] = mean("correction")
        metrics["correction/bounded"] = mean("bounded")
    return metrics


def _mismatch(accumulator: MetricAccumulator) -> dict[str, float]:
    """Compare sampler and trainer over the tokens whose start logprobs are known."""
    num_compared = accumulator.sum("num_compared")
    weight_square = num_compared * accumulator.sum("weight_square")
    return {
        "mismatch/mean": accumulator.sum("mismatch") / num_compared,
        "mismatch/max": accumulator.max("mismatch"),
        "mismatch/kl": accumulator.sum("mismatch_kl") / num_compared,
        "mismatch/effective_share": accumulator.sum("weight") ** 2 / weight_square,
    }
