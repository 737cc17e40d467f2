"""Find from a run's metrics what goes wrong in training, and say what to try.

Each alarm compares the last steps with a bound or with the first steps. The bounds are where people
begin to look, not where a run is lost.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

from openenv_pipe.errors import TrainingError
from openenv_pipe.registry import if_command
from openenv_pipe.reports.alarm import (
    WINDOW,
    Alarm,
    Record,
    ends_of,
    mean_of,
    means_of,
    share_of,
    sum_of,
)
from openenv_pipe.reports.collapse import COLLAPSES, SMALL_FALL
from openenv_pipe.reports.truncation import more_tokens, truncated
from openenv_pipe.reports.unusable import MANY_UNUSABLE, unusable_text
from openenv_pipe.runs.metrics import MEMORY

# Multiples of trainer.max_mismatch above which a mean warns, a token warns, a token ends a run.
WARNING_SHARE = 0.25
WARNING_FACTOR_OF_MAX = 10
LIMIT_FACTOR_OF_MAX = 50
STALE_MISMATCH = 0.2  # nats that a version may move a token on average: about what a clip allows
LOOSEST_MISMATCH = 0.4
UNUSABLE_RISE = 0.5  # above the lowest mean so far: the policy could act, and no longer does
FORGOTTEN = 5.0  # nats per token
ALMOST_ALL = 0.8  # share of the groups without a signal, above which the advice names a cause
EXPLORES = 0.2  # nats per token: above it, equal replies are short ones, or the task forces them
SOLVED = 0.9  # success of the last episodes: their tasks have little left to teach
CLIENTS = ("lost", "late", "failed")  # how an episode of a client fails
NUM_SETTLING = 10  # first measurements of memory, which rises while buffers are allocated

MISMATCH_CAUSES = (
    "the usual causes: another process has changed the weights of the server, or it serves another "
    "model or old weights; sampler and trainer compute the model differently, as with a kind of "
    "attention or position that one of them lacks, or in another precision (engine.dtype, "
    "model.autocast); an update so large that the weights broke (grad/norm, trainer.optimizer.lr)"
)
STALE_ADVICE = (
    "its tokens are of older weights, and the policy has moved far since: lower "
    "trainer.optimizer.lr or trainer.max_staleness"
)


class AlarmWatch:
    """Finds the alarms that a training run raises, each once.

    All of its state follows from the steps' metrics, so that a resumed run has the same.
    """

    def __init__(
        self, records: Sequence[Record], max_mismatch: float, *, forgets: bool = False
    ) -> None:
        """records: of earlier attempts. max_mismatch: `trainer.max_mismatch`.

        forgets: steps up to a collapse are forgotten, because the run goes back from there.
        """
        self.collapse: Alarm | None = None  # that the last step has raised
        self.num_collapses = 0
        self._records: list[Record] = []
        self._max_mismatch = max_mismatch
        self._forgets = forgets
        self._raised: set[tuple[str, bool]] = set()  # metrics, and whether it is a collapse
        for record in records:
            self.new_alarms(record)

    def new_alarms(self, record: Record) -> list[str]:
        """Return what goes wrong with this step and did not before, and what to try."""
        if self._forgets and self.collapse is not None:
            self._records.clear()
            self._raised.clear()
        self._records.append(record)
        is_settled = sum(each.get("stage") == "grpo" for each in self._records) >= WINDOW
        found = [
            alarm
            for alarm in find_alarms(self._records, self._max_mismatch)
            if (alarm.metric, alarm.is_collapse) not in self._raised
            and (is_settled or alarm.at_once)
        ]
        self._raised.update((alarm.metric, alarm.is_collapse) for alarm in found)
        self.collapse = next((alarm for alarm in found if alarm.is_collapse), None)
        self.num_collapses += self.collapse is not None
        return [f"alarm: {alarm.what}; {alarm.advice}" for alarm in found]


def find_alarms(records: Sequence[Record], max_mismatch: float = LOOSEST_MISMATCH) -> list[Alarm]:
    """Return the alarms of a run's last GRPO steps, the worst kind first.

    max_mismatch: `trainer.max_mismatch` of the run.
    """
    steps = [record for record in records if record.get("stage") == "grpo"]
    if not steps:
        return []
    found = [_not_finite(steps), _large_mismatch(steps, max_mismatch)]
    found += [check(steps) for check in CHECKS]
    return [alarm for alarm in found if alarm is not None]


def check_mismatch(step: Record, max_mismatch: float) -> None:
    """Raise TrainingError if the tokens of a step were not sampled by the policy that is trained.

    Tokens of older weights end no run: they differ by what the policy has learned since, which may
    be much. `AlarmWatch` warns about it.
    """
    if step.get("staleness/max"):
        return
    measured = _mismatch_above(step, max_mismatch, 1.0, LIMIT_FACTOR_OF_MAX)
    if measured is not None:
        raise TrainingError(
            f"step {step['step']}: {measured}, where at most trainer.max_mismatch={max_mismatch:g} "
            "is allowed: its tokens were not sampled by the policy that is trained, so nothing of "
            f"the step is kept; {MISMATCH_CAUSES}. Raise the bound only if the cause is known"
        )


def _mismatch_above(
    step: Record, max_mismatch: float, share: float, factor_of_max: float
) -> str | None:
    """Return what a step has measured if it is above a share of the limit; None if it is not.

    Tokens of older weights differ from the trainer's by what it has learned since. Only their mean
    has a bound then.
    """
    mean, highest = step.get("mismatch/mean"), step.get("mismatch/max")
    if mean is None or highest is None:
        return None
    staleness = step.get("staleness/max") or 0
    is_above = mean > share * max_mismatch + STALE_MISMATCH * staleness
    if not is_above and (staleness or highest <= factor_of_max * max_mismatch):
        return None
    kl = step.get("mismatch/kl")
    return (
        f"the logprobs of sampler and trainer differ by {mean:.2g} nats in the mean over tokens "
        f"and by up to {highest:.2g}" + ("" if kl is None else f" (KL {kl:.2g})")
    )


def _large_mismatch(steps: Sequence[Record], max_mismatch: float) -> Alarm | None:
    """Look at all steps: the tokens of each are trained on."""
    for step in reversed(steps):
        measured = _mismatch_above(step, max_mismatch, WARNING_SHARE, WARNING_FACTOR_OF_MAX)
        if measured is not None:
            return Alarm(
                metric="mismatch/max",
                what=f"In step {step['step']}, {measured}",
                advice=STALE_ADVICE
                if step.get("staleness/max")
                else f"{MISMATCH_CAUSES}; the run ends above trainer.max_mismatch",
                at_once=True,
            )
    return None


def _unlike(steps: Sequence[Record]) -> Alarm | None:
    """Look at all steps: one group that mixes tasks is enough for an alarm."""
    unlike = [step for step in steps if step.get("groups/unlike")]
    if not unlike:
        return None
    first = unlike[0]
    num_groups = (first.get("groups/trained") or 0) + (first.get("groups/skipped") or 0)
    return Alarm(
        metric="groups/unlike",
        what=f"The members of {first['groups/unlike']:g} of {num_groups:g} groups in step "
        f"{first['step']} were shown different first prompts (in {len(unlike)} of {len(steps)} "
        "steps so far): the environment ignores its seed, and different tasks are compared",
        advice=if_command("env", "let `openenv-pipe env check` compare episodes of one seed; ")
        + "if reset takes the task by a keyword, set it for each task (env.tasks.train, rows with "
        "reset keywords); if only an id or a clock differs, leave it out of the prompt "
        "(env.adapter)",
        at_once=True,
    )


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
    share = share_of(steps, "episodes/failed", "episodes/count")
    if share is None or share < 0.05:
        return None
    by_clients = sum(share_of(steps, f"clients/{how}", "episodes/failed") or 0 for how in CLIENTS)
    late = sum_of(steps, "episodes/timed_out")
    by_time = f", {late:.0f} because their environment gave no answer in time" if late else ""
    return Alarm(
        metric="episodes/failed",
        what=f"{share:.0%} of the episodes failed in the last steps{by_time}; they teach nothing",
        advice="read the errors of these episodes and the clients' own logs; raise "
        "agent.group_timeout_s if clients were late"
        if by_clients > 0.5
        else "read their errors (episodes with the status error) and the logs of the "
        "environment's servers; raise env.step_timeout_s if they ran out of time",
    )


def _untrained(steps: Sequence[Record]) -> Alarm | None:
    share = share_of(steps, "episodes/untrained", "episodes/count")
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
    share = share_of(steps, "judge/failed", "episodes/count")
    if share is None or share < 0.05:
        return None
    return Alarm(
        metric="judge/failed",
        what=f"The judge failed for {share:.0%} of the episodes in the last steps",
        advice="read why under an episode that has no reward; raise the judge's time limit or "
        "budget, or lower the number of requests that it gets at once",
    )


def _no_signal(steps: Sequence[Record]) -> Alarm | None:
    skipped, trained = (sum_of(steps, f"groups/{name}") for name in ("skipped", "trained"))
    if skipped is None or trained is None or skipped <= trained:
        return None
    is_collapse = not trained and _has_lost_signal_and_reward(steps)
    masked = share_of(steps, "episodes/masked", "episodes/count") or 0.0
    if masked > 0.5:
        return Alarm(
            metric="episodes/masked",
            what=f"A limit of tokens cut off {masked:.0%} of the last episodes, which have no loss",
            advice=more_tokens(steps, masked, "env.max_reply_tokens or env.max_episode_tokens")
            + ", or set trainer.loss.mask_truncated=false",
            is_collapse=is_collapse,
        )
    share, success = skipped / (skipped + trained), mean_of(steps[-WINDOW:], "success/rate")
    what = f"{share:.0%} of the last groups had no signal: all their episodes had one reward"
    if masked:
        what += f", or no loss, because a limit of tokens cut them off ({masked:.0%} of all)"
    identical, solved, unsolved = (
        (sum_of(steps, f"skipped/{kind}") or 0) / skipped
        for kind in ("identical", "solved", "unsolved")
    )
    entropy = mean_of(steps[-WINDOW:], "sampling/entropy")
    is_narrow = entropy is None or entropy < EXPLORES
    if identical > 0.5 and is_narrow and not (success is not None and success > SOLVED):
        return Alarm(
            metric="skipped/identical",
            what=f"{what}. In {identical:.0%} of these, all members wrote the same, token for "
            "token: the model no longer explores, however hard the tasks are",
            advice="go back to a checkpoint before the entropy fell (sampling/entropy), and raise "
            "trainer.loss.entropy_coef or, with several updates a step, trainer.loss.clip_high, or "
            "lower trainer.optimizer.lr; a model that begins so needs a higher trainer.temperature",
            is_collapse=is_collapse,
        )
    if solved or unsolved:
        what += f". {solved:.0%} of these groups always succeeded, {unsolved:.0%} never"
    return Alarm(
        metric="groups/skipped",
        what=what,
        advice=f"{_why_no_signal(solved, unsolved)}. What gives more groups a signal: "
        "env.tasks.order=curriculum, a larger trainer.max_sampling_rounds, which plays others in "
        "their place, a larger trainer.group_size, or a reward with more levels",
        is_collapse=is_collapse,
    )


def _why_no_signal(solved: float, unsolved: float) -> str:
    """solved, unsolved: the fractions of groups without a signal that always succeed, or never."""
    if unsolved > ALMOST_ALL:
        return (
            "the tasks are probably too hard for the model: show it what a good reply looks like "
            "(env.adapter.examples), begin with trainer.warm_start, or choose easier tasks"
        )
    if solved > ALMOST_ALL:
        return "the tasks are probably too easy for the model: choose harder ones"
    return (
        "the outcome depends on the task and not on the model's choices: its entropy has "
        "collapsed (sampling/entropy), or each task is either too easy or too hard for it"
    )


def _has_lost_signal_and_reward(steps: Sequence[Record]) -> bool:
    """Return whether most groups once had a signal, and the reward was higher."""
    with_signal = means_of(steps, "groups/trained")
    without = means_of(steps, "groups/skipped")
    rewards = means_of(steps, "reward/mean")
    if not rewards or not any(a > b for a, b in zip(with_signal, without, strict=False)):
        return False
    best = max(rewards)
    return best - rewards[-1] > SMALL_FALL * abs(best)


def _mismatch(steps: Sequence[Record]) -> Alarm | None:
    first, last = ends_of(steps, "mismatch/mean")
    if last is None or last < 0.01 or (first is not None and last < 2 * first):
        return None
    return Alarm(
        metric="mismatch/mean",
        what=f"The logprobs of sampler and trainer have moved apart: from {first:.2g} to "
        f"{last:.2g} nats a token",
        advice="choose a correction (trainer.loss.correction.type=truncate), lower "
        "trainer.max_staleness, or run the engine in the trainer's precision",
    )


def _clipped(steps: Sequence[Record]) -> Alarm | None:
    share = mean_of(steps[-WINDOW:], "clip/share")
    if share is None or share < 0.1:
        return None
    return Alarm(
        metric="clip/share",
        what=f"The clip acts on {share:.0%} of the tokens: each update goes further than it allows",
        advice="lower trainer.optimizer.lr, trainer.updates_per_step or trainer.passes_per_step",
    )


def _unusable(steps: Sequence[Record]) -> Alarm | None:
    means = means_of(steps, "replies/unusable")
    share = means[-1] if means else mean_of(steps, "replies/unusable")
    if share is None or share < MANY_UNUSABLE:
        return None
    return Alarm(
        metric="replies/unusable",
        what=unusable_text(share, "replies of the last steps"),
        advice="read some replies"
        + if_command("episodes", " (`openenv-pipe episodes latest --worst 3`)")
        + "; if they cost nothing yet, reward=usable changes that",
        at_once=share > 0.99,
        is_collapse=bool(means) and share - min(means) > UNUSABLE_RISE,
    )


def _forgotten(steps: Sequence[Record]) -> Alarm | None:
    distance = mean_of(steps[-WINDOW:], "kl/start")
    if distance is None or distance < FORGOTTEN:
        return None
    return Alarm(
        metric="kl/start",
        what=f"KL(start || policy) is {distance:.2g} nats a token: the policy hardly writes "
        "any more what it wrote in its first step",
        advice="read some replies"
        + if_command("episodes", " (`openenv-pipe episodes latest`)")
        + "; if they are gibberish, lower trainer.optimizer.lr to a third, or hold the policy "
        "back with trainer.loss.kl.coef",
    )


def _memory(steps: Sequence[Record]) -> Alarm | None:
    """Compare the means of four equal parts: memory that has settled no longer rises."""
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
        advice="check which process grows (htop): a server of the environment that keeps what its "
        "sessions leave behind, or code of your own, such as a reward or a callback that keeps "
        "episodes; until it is fixed, end the run with Ctrl-C and continue it with --resume, "
        "which starts all processes anew",
    )


CHECKS: Sequence[Callable[[Sequence[Record]], Alarm | None]] = (
    *(_unlike, _failed, _untrained, _judge, _no_signal, _mismatch, _clipped, truncated),
    *(_unusable, _forgotten, _memory),
    *COLLAPSES,
)
