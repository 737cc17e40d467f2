"""Alarms of a policy that its own updates destroy: `trainer.guard` says what a run does then.

Those of unusable replies and of groups without a signal, which have other causes as well, are in
`alarms.py`.
"""

from collections.abc import Callable, Sequence
from statistics import median

from openenv_pipe.reports.alarm import (
    WINDOW,
    Alarm,
    Record,
    ends_of,
    mean_of,
    means_of,
    reward_error,
)

FALL = 0.5  # of what was gained, or
SMALL_FALL = 0.2  # of the best, whichever is more
NUM_ERRORS = 3.0  # standard errors that a fall is more than
GRADIENT_FACTOR = 10.0


def _reward(steps: Sequence[Record]) -> Alarm | None:
    """Compare the last steps with the best ones before them, beyond what chance explains."""
    known = [step for step in steps if step.get("reward/mean") is not None]
    if len(known) < 2 * WINDOW:
        return None
    means = means_of(known, "reward/mean")
    first, best, last = means[0], max(means), means[-1]
    peak = known[means.index(best) : means.index(best) + WINDOW]
    # A few rewards among many zeros spread more in their own steps than over all steps.
    chance = NUM_ERRORS * max(reward_error(known), reward_error(peak))
    if best - last <= max(FALL * (best - first), SMALL_FALL * abs(best), chance):
        return None
    return Alarm(
        metric="reward/mean",
        what=f"The reward has fallen from {best:.3g}, its best mean over {WINDOW} steps, at step "
        f"{peak[-1]['step']}, to {last:.3g}",
        advice="lower trainer.optimizer.lr to a third, from the best checkpoint "
        "(openenv-pipe train --fork RUN@best); trainer.guard=back does so by itself",
        is_collapse=True,
    )


def _gradient(steps: Sequence[Record]) -> Alarm | None:
    norms = [step["grad/norm"] for step in steps if step.get("grad/norm") is not None]
    if len(norms) < 3 * WINDOW:
        return None
    usual, last = median(norms[:-WINDOW]), median(norms[-WINDOW:])
    if last <= GRADIENT_FACTOR * usual:
        return None
    return Alarm(
        metric="grad/norm",
        what=f"The norm of the gradient has grown from {usual:.3g} to {last:.3g}",
        advice="lower trainer.optimizer.lr; a smaller trainer.optimizer.max_grad_norm limits "
        "single steps",
        is_collapse=True,
    )


def _entropy(steps: Sequence[Record]) -> Alarm | None:
    """Look at all sampled tokens: once the model has collapsed, none is trained on."""
    name = "sampling/entropy"
    if all(step.get(name) is None for step in steps):
        name = "loss/entropy"  # of a version that did not measure the other
    first, last = ends_of(steps, name)
    success = mean_of(steps[-WINDOW:], "success/rate")
    if first is None or last is None or last > 0.1 * first:
        return None
    if success is not None and success > 0.9:
        return None  # The model is certain because it has learned the task.
    return Alarm(
        metric=name,
        what=f"The entropy has collapsed from {first:.3g} to {last:.3g} nats a token: the model "
        "hardly explores any more",
        advice="raise trainer.loss.clip_high (0.28 in DAPO) or trainer.loss.entropy_coef, lower "
        "trainer.optimizer.lr, or go back to a checkpoint before the fall",
        is_collapse=True,
    )


COLLAPSES: Sequence[Callable[[Sequence[Record]], Alarm | None]] = (_reward, _entropy, _gradient)
