"""Evaluation reports: scores of a model's episodes.

These are pure functions of episodes. Failed episodes are counted but not scored, so that a dead
server does not look like a bad model.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field

from openenv_pipe.algorithms.agreement import environment_reward
from openenv_pipe.config.schema import EvalConfig, RewardConfig
from openenv_pipe.system.files import digest_of_bytes
from openenv_pipe.system.intervals import FRACTIONS, Bounds, Interval, bootstrap_interval, pass_at_k
from openenv_pipe.system.untrusted_text import code_span
from openenv_pipe.types import Episode

MAX_SHORT_REPLY = 80  # characters: a label, a letter or a number
COLLAPSED = 0.8  # share of equal replies; above it, the model hardly looks at its tasks


class FrozenModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _finite(interval: Interval) -> Interval:
    values = (interval.mean, interval.low, interval.high)
    if not all(math.isfinite(value) for value in values if value is not None):
        raise ValueError("the interval is not finite")
    return interval


FiniteInterval = Annotated[Interval, AfterValidator(_finite)]


class TaskScores(FrozenModel):
    """The episodes of one task that count; each list has an entry per episode.

    `rewards` lacks those in whose reward a term has no value, or only compares a group's episodes.
    """

    task: str
    task_seed: int
    reset_digest: str  # of the reset keywords: tasks of equal id and seed may still differ
    num_failed: int  # episodes without a reward included
    seeds: Annotated[list[int], FailFast()]
    successes: Annotated[list[bool], FailFast()]
    rewards: Annotated[list[float], FailFast()]
    # the environment's own, if the reward has relative terms
    env_rewards: Annotated[list[float], FailFast()] = []
    turns: Annotated[list[int], FailFast()]
    statuses: Annotated[list[str], FailFast()]
    labels: dict[str, str] = {}

    @property
    def key(self) -> tuple[str, int, str]:
        return self.task, self.task_seed, self.reset_digest


class LabelScores(FrozenModel):
    """The tasks of one label, such as those of difficulty 3. Intervals are as in `EvalReport`."""

    num_tasks: int
    num_scored_tasks: int
    success: FiniteInterval | None
    reward: FiniteInterval | None


class CommonReply(FrozenModel):
    """The most frequent reply to different tasks, in an evaluation with one short reply each."""

    text: str
    num_episodes: int
    num_successes: int


# Keys of `measured_with` that may decide what a success or a reward is.
SCORING = re.compile(
    r"(?:beside\.[^.]+\.)?(?:env_code|env_files\.|callables\.|env_functions\.|reward\.|judge\."
    r"|env\.(?:success_reward|variables\.))"
)


class EvalReport(FrozenModel):
    """One model on the eval tasks, with an interval for each mean."""

    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]  # start, warm_start, trained, ...
    model: str
    step: int | None  # GRPO steps that trained the model; None: not trained by a run
    temperature: float | None  # None: a scripted policy
    opponent: str | None = None  # of games: `eval.opponent`
    sampling: dict[str, float] = {}  # what changed the sampled distribution, such as top_p
    num_tasks: int
    samples_per_task: int
    num_failed: int
    num_timed_out: int = 0  # of the failed ones, those without an answer in time
    statuses: dict[str, int]  # counts over all episodes
    unsuccessful: dict[str, int]  # counts over those without success, failed ones included
    # None if every episode failed; no limits if too few tasks were scored (eval.min_scored_share).
    success: FiniteInterval | None
    reward: FiniteInterval | None
    env_reward: FiniteInterval | None = None  # the environment's own, where `reward` is relative
    turns: FiniteInterval | None
    pass_at: dict[int, FiniteInterval]  # by k: 2, 4, 8, ... and samples_per_task; see left_out_ks
    # A damaged file may have a million errors; tasks are too many for a repr.
    tasks: Annotated[list[TaskScores], FailFast(), Field(repr=False)]
    by_label: dict[str, dict[str, LabelScores]] = {}  # by the column, and the label in it
    unusable: float | None = None  # fraction of the replies that could not become an action
    # scored episodes that differ from each other in an observation or a reply
    num_distinct: int | None = None
    common_reply: CommonReply | None = None
    error: str | None = None  # why nothing could be played; of baselines only
    # Settings and code of environment, reward and judge that differ from the run's: `1.0, not 0.5`.
    measured_with: dict[str, str] = {}
    confidence: float | None = None  # of the intervals; None: eval.confidence of the run

    @property
    def other_scoring(self) -> dict[str, str]:
        """What of `measured_with` may decide what a success or a reward is.

        Reports of one run in which it differs do not compare.
        """
        return {key: how for key, how in self.measured_with.items() if SCORING.match(key)}

    @property
    def num_unscored(self) -> int:
        """The number of episodes that did not fail and have no reward."""
        return sum(task.num_failed for task in self.tasks) - self.num_failed

    @property
    def num_scored_tasks(self) -> int:
        """The number of tasks that have an episode that counts: the means are over these."""
        return sum(bool(task.successes) for task in self.tasks)

    @property
    def num_scored_episodes(self) -> int:
        """The number of episodes that count."""
        return sum(len(task.successes) for task in self.tasks)

    def num_tasks_at(self, k: int) -> int:
        """Return the number of tasks that have k scored samples: pass@k is over these."""
        return sum(len(task.successes) >= k for task in self.tasks)

    def pass_on(self, k: int) -> str:
        """Return ` on 85 tasks` if pass@k is over fewer tasks than the success; empty if not."""
        num = self.num_tasks_at(k) if k in self.pass_at else self.num_scored_tasks
        return f" on {num} task{'s' * (num != 1)}" if num < self.num_scored_tasks else ""

    @property
    def left_out_ks(self) -> list[int]:
        """The k without a pass@k, because too few tasks have k scored samples."""
        return [k for k in _ks(self.samples_per_task) if k not in self.pass_at]

    @property
    def is_representative(self) -> bool:
        """True if enough tasks were scored for a decision: their success has an interval.

        An evaluation of a single task has none, and is representative by choice.
        """
        return self.success is not None and (self.success.low is not None or self.num_tasks == 1)

    @property
    def collapse(self) -> str | None:
        """A warning if most replies are the same and not always successful; None if not."""
        common, num_scored = self.common_reply, self.num_scored_episodes
        if common is None or common.num_episodes <= COLLAPSED * num_scored:
            return None
        if common.num_successes == common.num_episodes:
            return None
        return (
            f"{common.num_episodes} of {num_scored} replies are {code_span(common.text)}, "
            f"successful in {common.num_successes}"
        )

    @property
    def on_tasks(self) -> str:
        """The tasks that the means are over, for sentences."""
        return tasks_text(self.num_scored_tasks, self.num_tasks)

    @property
    def played(self) -> str:
        """What was played, for lists of evaluations: `9 of 10 tasks scored, 4 samples each`."""
        samples = f"{self.samples_per_task} sample{'s' * (self.samples_per_task != 1)} each"
        return f"{self.num_scored_tasks} of {self.num_tasks} tasks scored, {samples}"


def tasks_text(num_scored: int, num_tasks: int) -> str:
    """Say on how many tasks a mean is: `50 tasks`, or `1 of 10 tasks scored`."""
    if num_scored < num_tasks:
        return f"{num_scored} of {num_tasks} tasks scored"
    return f"{num_tasks} task{'s' * (num_tasks != 1)}"


def summarise(
    label: str,
    episodes: Sequence[Episode],
    config: EvalConfig,
    seed: int,
    *,
    reward: RewardConfig,
    model: str,
    step: int | None,
    temperature: float | None,
    sampling: Mapping[str, float] | None = None,
    opponent: str | None = None,
) -> EvalReport:
    """Group episodes by task and compute means with intervals. `seed` is the bootstrap's."""
    tasks = _scores_by_task(episodes, reward)
    scored = [each for each in episodes if each.is_scored]
    # An environment that reports no reward is one whose rewards are all 0.
    has_env_rewards = any(any(task.env_rewards) for task in tasks)
    samples_per_task = max(len(task.seeds) + task.num_failed for task in tasks)

    def interval(
        values_of: Callable[[TaskScores], Sequence[float]],
        bounds: Bounds | None = None,
        among: Sequence[TaskScores] = tasks,
    ) -> Interval | None:
        return bootstrap_interval(
            [values_of(task) for task in among],
            num_resamples=config.num_resamples,
            confidence=config.confidence,
            seed=seed,
            bounds=bounds,
            min_share=config.min_scored_share,
        )

    ks = _measured_ks(tasks, samples_per_task, config.min_scored_share)
    pass_at = {k: interval(partial(_pass_at_k, k=k), FRACTIONS) for k in ks}
    return EvalReport(
        label=label,
        model=model,
        step=step,
        temperature=temperature,
        opponent=opponent,
        sampling=dict(sampling or {}),
        num_tasks=len(tasks),
        samples_per_task=samples_per_task,
        num_failed=sum(episode.failed for episode in episodes),
        num_timed_out=sum(episode.timed_out for episode in episodes),
        statuses=_count_statuses(episodes),
        unsuccessful=_count_statuses([e for e in episodes if e.failed or not e.success]),
        success=interval(lambda task: task.successes, FRACTIONS),
        reward=interval(lambda task: task.rewards),
        env_reward=interval(lambda task: task.env_rewards) if has_env_rewards else None,
        turns=interval(lambda task: task.turns),
        pass_at={k: found for k, found in pass_at.items() if found is not None},
        tasks=tasks,
        by_label=_by_label(tasks, interval),
        unusable=_unusable_share(episodes),
        num_distinct=len({_conversation_digest(each) for each in scored}),
        common_reply=_common_reply(scored),
    )


def unplayed(label: str, model: str, error: str) -> EvalReport:
    """Return the report of a scripted policy that could not be played."""
    return EvalReport(
        label=label,
        model=model,
        step=None,
        temperature=None,
        num_tasks=0,
        samples_per_task=0,
        num_failed=0,
        statuses={},
        unsuccessful={},
        success=None,
        reward=None,
        turns=None,
        pass_at={},
        tasks=[],
        error=error,
    )


def in_order(labels: Iterable[str]) -> list[str]:
    """Sort the labels of a column: those that are numbers first, by their value."""

    def place(label: str) -> tuple[float, str]:
        try:
            number = float(label)
        except ValueError:
            number = math.inf
        return (number if math.isfinite(number) else math.inf), label

    return sorted(labels, key=place)


def _by_label(
    tasks: Sequence[TaskScores], interval: Callable[..., Interval | None]
) -> dict[str, dict[str, LabelScores]]:
    """Return the scores of the tasks by column, and by their label in it."""
    found: dict[str, dict[str, list[TaskScores]]] = {}
    for task in tasks:
        for column, label in task.labels.items():
            found.setdefault(column, {}).setdefault(label, []).append(task)
    return {
        column: {
            label: LabelScores(
                num_tasks=len(among),
                num_scored_tasks=sum(bool(task.successes) for task in among),
                success=interval(lambda task: task.successes, FRACTIONS, among),
                reward=interval(lambda task: task.rewards, among=among),
            )
            for label, among in labelled.items()
        }
        for column, labelled in found.items()
    }


def _ks(num_samples: int) -> list[int]:
    """Return 2, 4, 8, ... and the number of samples; pass@1 is the success rate."""
    return sorted({*(2**i for i in range(1, num_samples.bit_length())), num_samples} - {1})


def _measured_ks(tasks: Sequence[TaskScores], num_samples: int, min_share: float) -> list[int]:
    """Return those of `_ks` that enough tasks have scored; a few are a biased selection."""
    least = min_share * len(tasks)
    return [k for k in _ks(num_samples) if sum(len(t.successes) >= k for t in tasks) >= least]


def _pass_at_k(task: TaskScores, k: int) -> list[float]:
    """Return the task's estimate, or nothing if too many of its samples failed."""
    num_samples = len(task.successes)
    return [pass_at_k(num_samples, sum(task.successes), k)] if num_samples >= k else []


def _count_statuses(episodes: Sequence[Episode]) -> dict[str, int]:
    return dict(sorted(Counter(str(episode.status) for episode in episodes).items()))


def _unusable_share(episodes: Sequence[Episode]) -> float | None:
    turns = [turn for episode in episodes if episode.is_scored for turn in episode.turns]
    return sum(turn.unusable is not None for turn in turns) / len(turns) if turns else None


def _common_reply(scored: Sequence[Episode]) -> CommonReply | None:
    """Return the most frequent reply; None unless tasks differ and each has one short reply."""
    replies = [episode.turns[0].reply.strip() for episode in scored if len(episode.turns) == 1]
    firsts = {json.dumps(each.first_observation, sort_keys=True, default=str) for each in scored}
    if len(replies) < len(scored) or len(firsts) < 2 or max(map(len, replies)) > MAX_SHORT_REPLY:
        return None
    text, num_episodes = Counter(replies).most_common(1)[0]
    successes = [e.success for e, reply in zip(scored, replies, strict=True) if reply == text]
    return CommonReply(text=text, num_episodes=num_episodes, num_successes=sum(successes))


def _conversation_digest(episode: Episode) -> str:
    """Return sha256 over what the environment and the policy said, in order."""
    said = [[turn.reply, [step.observation for step in turn.steps]] for turn in episode.turns]
    text = json.dumps([episode.first_observation, said], sort_keys=True, default=str)
    return digest_of_bytes(text.encode(errors="surrogatepass"))


def _scores_by_task(episodes: Sequence[Episode], reward: RewardConfig) -> list[TaskScores]:
    """Return the scores of each task, in the order of task indices and members."""
    by_task: dict[tuple[int, str, int], list[Episode]] = {}
    for episode in episodes:
        task = episode.task
        by_task.setdefault((task.index, task.id, task.seed), []).append(episode)
    return [_scores(played, reward) for _, played in sorted(by_task.items())]


def _scores(episodes: Sequence[Episode], reward: RewardConfig) -> TaskScores:
    scored = sorted((e for e in episodes if e.is_scored), key=lambda episode: episode.member)
    # Terms have no value where there is nothing to compare, or no budget left for the judge.
    measured = [
        episode
        for episode in scored
        if all(name in episode.reward_terms for name in reward.counted) and not reward.standardised
    ]
    task = episodes[0].task
    reset = json.dumps(task.reset, sort_keys=True, default=str)
    return TaskScores(
        task=task.id,
        task_seed=task.seed,
        reset_digest=digest_of_bytes(reset.encode())[:16],
        num_failed=len(episodes) - len(scored),
        seeds=[episode.seed for episode in scored],
        successes=[episode.success for episode in scored],
        rewards=[episode.reward for episode in measured],
        env_rewards=[environment_reward(each) for each in scored] if reward.relative else [],
        turns=[len(episode.turns) for episode in scored],
        statuses=[str(episode.status) for episode in scored],
        labels=dict(task.labels),
    )
