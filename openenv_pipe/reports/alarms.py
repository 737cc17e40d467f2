"""Find what goes wrong in a training from its metrics, and say what to try.

Each alarm compares the last steps with a bound or with the first steps. The bounds are where people
begin to look, not where a run is lost.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from openenv_pipe.runs.metrics import MEMORY

WINDOW = 5  # steps that a mean is over
NUM_SETTLING = 10  # first measurements of memory, which rises while buffers are allocated

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """One thing that goes wrong. `metric` is the curve to look at."""

    metric: str
    what: str
    advice: str


def find_alarms(records: Sequence[Record]) -> list[Alarm]:
    """Return the alarms of a run's last GRPO steps, the worst kind first."""
    steps = [record for record in records if record.get("stage") == "grpo"]
    if not steps:
        return []
    found = [check(steps) for check in CHECKS]
    return [alarm for alarm in found if alarm is not None]


def _not_finite(steps: Sequence[Record]) -> Alarm | None:
    for name in ("loss/total", "grad/norm"):
        if name in steps[-1] and steps[-1][name] is None:
            return Alarm(
                metric=name,
                what=f"{name} of step {steps[-1]['step']} is not a finite number",
                advice="lower trainer.optimizer.lr, set trainer.optimizer.max_grad_norm, and look "
                "at the mismatch of sampler and trainer before that step",
            )
    return None


def _failed(steps: Sequence[Record]) -> Alarm | None:
    share = _share(steps, "episodes/failed", "episodes/count")
    if share is None or share < 0.05:
        return None
    return Alarm(
        metric="episodes/failed",
        what=f"{share:.0%} of the episodes failed in the last steps; they teach nothing",
        advice="read their errors (episodes with the status error) and the logs of the "
        "environment's servers; raise env.step_timeout_s if they ran out of time",
    )


def _untrained(steps: Sequence[Record]) -> Alarm | None:
    share = _share(steps, "episodes/untrained", "episodes/count")
    if share is None or share < 0.05:
        return None
    return Alarm(
        metric="episodes/untrained",
        what=f"{share:.0%} of the last episodes have a reward, but no token that can be trained; "
        "they teach nothing",
        advice="raise env.max_episode_tokens if prompts leave no room for a reply; with "
        "agent=program, see in the episodes why all calls are retries or auxiliary",
    )


def _judge(steps: Sequence[Record]) -> Alarm | None:
    share = _share(steps, "judge/failed", "episodes/count")
    if share is None or share < 0.05:
        return None
    return Alarm(
        metric="judge/failed",
        what=f"The judge failed for {share:.0%} of the episodes in the last steps",
        advice="read why under an episode that has no reward; raise the judge's time limit or "
        "budget, or lower the number of requests that it gets at once",
    )


def _no_signal(steps: Sequence[Record]) -> Alarm | None:
    skipped, trained = (_sum(steps, f"groups/{name}") for name in ("skipped", "trained"))
    if skipped is None or trained is None or skipped <= trained:
        return None
    share, success = skipped / (skipped + trained), _mean(steps[-WINDOW:], "success/rate")
    is_easy = success is not None and success > 0.5
    kind = "easier for the model than they should be" if is_easy else "too hard for it now"
    return Alarm(
        metric="groups/skipped",
        what=f"{share:.0%} of the last groups had no signal: all their episodes had one reward",
        advice=f"the tasks are probably {kind}: choose others, or env.tasks.order=curriculum; play "
        "other groups in their place (trainer.max_sampling_rounds above 1); a larger "
        "trainer.group_size; a reward with more levels",
    )


def _entropy(steps: Sequence[Record]) -> Alarm | None:
    first, last = _ends(steps, "loss/entropy")
    success = _mean(steps[-WINDOW:], "success/rate")
    if first is None or last is None or last > 0.1 * first:
        return None
    if success is not None and success > 0.9:
        return None  # The model is certain because it has learned the task.
    return Alarm(
        metric="loss/entropy",
        what=f"The entropy has collapsed from {first:.3g} to {last:.3g} nats a token: the model "
        "hardly explores any more",
        advice="raise trainer.loss.clip_high (0.28 in DAPO) or trainer.loss.entropy_coef, lower "
        "trainer.optimizer.lr, or go back to a checkpoint before the fall",
    )


def _mismatch(steps: Sequence[Record]) -> Alarm | None:
    first, last = _ends(steps, "mismatch/mean")
    if last is None or last < 0.01 or (first is not None and last < 2 * first):
        return None
    return Alarm(
        metric="mismatch/mean",
        what=f"The logprobs of sampler and trainer have moved apart: from {first:.2g} to "
        f"{last:.2g} a token",
        advice="choose a correction (trainer.loss.correction.type=truncate), lower "
        "trainer.max_staleness, or run the engine in the trainer's precision",
    )


def _clipped(steps: Sequence[Record]) -> Alarm | None:
    share = _mean(steps[-WINDOW:], "clip/share")
    if share is None or share < 0.1:
        return None
    return Alarm(
        metric="clip/share",
        what=f"The clip acts on {share:.0%} of the tokens: each update goes further than it may",
        advice="lower trainer.optimizer.lr or trainer.updates_per_step",
    )


def _truncated(steps: Sequence[Record]) -> Alarm | None:
    share = _share(steps, "episodes/truncated", "episodes/count")
    if share is None or share < 0.25:
        return None
    return Alarm(
        metric="episodes/truncated",
        what=f"A limit of tokens or turns ended {share:.0%} of the last episodes, or cut a reply",
        advice="raise env.max_reply_tokens, env.max_episode_tokens or env.max_turns, or add "
        "reward=overlong, which makes long replies cost something",
    )


def _unusable(steps: Sequence[Record]) -> Alarm | None:
    share = _mean(steps[-WINDOW:], "replies/unusable")
    if share is None or share < 0.5:
        return None
    return Alarm(
        metric="replies/unusable",
        what=f"{share:.0%} of the last replies could not be turned into an action",
        advice="read such replies (episodes with unusable replies); describe the format in "
        "env.adapter.system, or begin with a warm start; reward=usable makes them cost something",
    )


def _memory(steps: Sequence[Record]) -> Alarm | None:
    """Compare the means of four parts: memory that has reached its level rises no more."""
    values = [step[MEMORY] for step in steps if step.get(MEMORY) is not None][NUM_SETTLING:]
    size = len(values) // 4
    if size < WINDOW:
        return None
    means = [fmean(values[part * size : (part + 1) * size]) for part in range(4)]
    if min(after - before for before, after in pairwise(means)) < 0.02 * means[0]:
        return None
    return Alarm(
        metric=MEMORY,
        what=f"The memory of the run's processes rises steadily: from {means[0]:.2f} to "
        f"{means[-1]:.2f} GiB",
        advice="look which process grows (htop): a server of the environment that keeps what its "
        "sessions leave behind, or code of your own, such as a reward or a callback that keeps "
        "episodes; until it is mended, end the run with Ctrl-C and continue it with --resume, "
        "which starts all processes anew",
    )


CHECKS: Sequence[Callable[[Sequence[Record]], Alarm | None]] = (
    *(
        _not_finite,
        _failed,
        _untrained,
        _judge,
        _no_signal,
        _entropy,
        _mismatch,
        _clipped,
        _truncated,
    ),
    *(_unusable, _memory),
)


def _ends(steps: Sequence[Record], name: str) -> tuple[float | None, float | None]:
    """Return the means over the first and the last steps; None while they overlap."""
    if len(steps) < 2 * WINDOW:
        return None, None
    return _mean(steps[:WINDOW], name), _mean(steps[-WINDOW:], name)


def _mean(steps: Sequence[Record], name: str) -> float | None:
    values = [step[name] for step in steps if step.get(name) is not None]
    return fmean(values) if values else None


def _sum(steps: Sequence[Record], name: str) -> float | None:
    values = [step[name] for step in steps[-WINDOW:] if step.get(name) is not None]
    return sum(values) if values else None


def _share(steps: Sequence[Record], name: str, of: str) -> float | None:
    part, whole = _sum(steps, name), _sum(steps, of)
    return part / whole if part is not None and whole else None
