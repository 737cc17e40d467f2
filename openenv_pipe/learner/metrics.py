"""The learner's metrics of a step, from what its batches were tallied to: docs/metrics.md.

The names are stable; each is explained there.
"""

import math
from collections.abc import Sequence

from openenv_pipe.learner.accumulator import Tally


def step_metrics(tally: Tally, gradient_norms: Sequence[float], lr: float) -> dict[str, float]:
    """Means over the trained tokens; of losses and norms over the step's optimizer updates."""
    num_updates, num_tokens = len(gradient_norms), tally.sum("num_tokens")

    def mean(name: str) -> float:
        return tally.sum(name) / num_tokens

    advantage = mean("advantage")
    metrics = {
        "loss/total": tally.sum("loss") / num_updates,
        "loss/policy": tally.sum("policy_loss") / num_updates,
        "loss/kl": mean("kl"),
        "loss/entropy": mean("entropy"),
        "clip/share": (tally.sum("clipped_low") + tally.sum("clipped_high")) / num_tokens,
        "clip/low": mean("clipped_low"),
        "clip/high": mean("clipped_high"),
        "ratio/max": tally.max("ratio"),
        "ratio/min": -tally.max("negative_ratio"),
        "advantage/mean": advantage,
        "advantage/std": math.sqrt(max(0.0, mean("advantage_square") - advantage**2)),
        "advantage/max": tally.max("advantage"),
        "advantage/min": -tally.max("negative_advantage"),
        "grad/norm": max(gradient_norms),
        "lr": lr,
        "tokens/trained": int(num_tokens),
        "tokens/computed": int(tally.sum("num_computed")),
    }
    return metrics | _mismatch(tally) | _correction(tally, num_tokens)


def _mismatch(tally: Tally) -> dict[str, float]:
    """Between sampler and trainer, over the tokens for which the trainer's start is known."""
    num_compared = tally.sum("num_compared")
    weight_square = num_compared * tally.sum("weight_square")
    return {
        "mismatch/mean": tally.sum("mismatch") / num_compared,
        "mismatch/max": tally.max("mismatch"),
        "mismatch/kl": tally.sum("mismatch_kl") / num_compared,
        "mismatch/effective_share": tally.sum("weight") ** 2 / weight_square,
    }


def _correction(tally: Tally, num_tokens: float) -> dict[str, float]:
    """Only where one is configured."""
    if not tally.has("correction"):
        return {}
    return {
        "correction/mean": tally.sum("correction") / num_tokens,
        "correction/bounded": tally.sum("bounded") / num_tokens,
    }
