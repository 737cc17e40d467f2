"""Score the episodes of a group: ask all terms for their values, and compose the rewards."""

import asyncio
import math
from collections.abc import Sequence

from openenv_pipe.config.schema import JudgeTerm, RewardConfig, RulerTerm, TermConfig
from openenv_pipe.errors import JudgeError, raise_first
from openenv_pipe.rewards.composition import compose_rewards, reason_of
from openenv_pipe.rewards.judges import CriteriaTerm, Judge, Ruler
from openenv_pipe.rewards.terms import EpisodeTerm
from openenv_pipe.rewards.values import GroupTerm
from openenv_pipe.types import Group


class Scorer:
    """Sets success, rewards and reward terms of episodes, in place."""

    def __init__(
        self,
        config: RewardConfig,
        success_reward: float,
        judge: Judge | None = None,
    ) -> None:
        """judge: for the terms that need one; None leaves them out.

        Raises ConfigError if the function or the pattern of a term cannot be used.
        """
        self._success_reward = success_reward
        self._judge = judge
        self._judged = [name for name, term in config.terms.items() if term.asks_judge]
        left_out = [] if judge else self._judged
        terms = {name: term for name, term in config.terms.items() if name not in left_out}
        self._config = config.model_copy(update={"terms": terms})
        self._terms = {name: _term(name, term, judge) for name, term in terms.items()}

    @property
    def reads_messages(self) -> bool:
        """Whether episodes have to keep their messages, because a judge reads them."""
        return self._judge is not None and bool(self._judged)

    async def score(self, group: Group) -> None:
        """Set the rewards of a group's episodes. A failed episode keeps zeros: nothing uses it.

        Where a term has no value, because a judge has failed, the episode is left `unscored`.

        Raises:
            JudgeError, ConfigError: the run cannot go on.
        """
        for episode in group.scored:
            total = math.fsum(turn.reward for turn in episode.turns)
            episode.success = total >= self._success_reward
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = {
                    name: tasks.create_task(term.values(group))
                    for name, term in self._terms.items()
                }
        except BaseExceptionGroup as errors:
            raise_first(errors)
        values = {name: task.result() for name, task in asked.items()}
        compose_rewards(self._config, group, values)

    def accept(self, groups: Sequence[Group]) -> None:
        """Accept the verdicts of a step or an evaluation.

        Raises:
            JudgeError: the judge failed for a larger share than `judge.max_failed_share`.
        """
        if self._judge is None:
            return
        starts = tuple(reason_of(name) for name in self._judged)
        played = [e for group in groups for e in group.episodes if not e.failed]
        reasons = [e.unscored for e in played if e.unscored and e.unscored.startswith(starts)]
        limit = self._judge.max_failed_share
        if len(reasons) > limit * len(played):
            raise JudgeError(
                f"the judge gave no verdict for {len(reasons)} of {len(played)} episodes, more "
                f"than judge.max_failed_share={limit:g}; the last reason: {reasons[-1]}"
            )
        self._judge.keep_failures()


def _term(name: str, term: TermConfig, judge: Judge | None) -> GroupTerm:
    match term:
        case RulerTerm():
            assert judge is not None
            return Ruler(term, judge)
        case JudgeTerm():
            assert judge is not None
            return CriteriaTerm(name, term, judge)
        case _:
            return EpisodeTerm(name, term)
