"""Score the episodes of a group: terms of single episodes, then those that compare episodes."""

from collections.abc import Sequence

from openenv_pipe.config.schema import RewardConfig, RulerTerm
from openenv_pipe.errors import JudgeError
from openenv_pipe.rewards.judges import Judge, Ruler
from openenv_pipe.rewards.judges.judge import BudgetSpentError, NoVerdictError
from openenv_pipe.rewards.terms import EpisodeScorer
from openenv_pipe.types import Episode, Group


class Scorer:
    """Sets success, rewards and reward terms of episodes, in place."""

    def __init__(
        self,
        config: RewardConfig,
        success_reward: float,
        judge: Judge | None = None,
    ) -> None:
        """judge: for the terms that need one; None leaves them out."""
        self._episode_scorer = EpisodeScorer(config, success_reward)
        self._judge = judge
        self._rulers = {
            name: (Ruler(term, judge), term)
            for name, term in config.terms.items()
            if judge and isinstance(term, RulerTerm)
        }

    @property
    def reads_messages(self) -> bool:
        """Whether episodes have to keep their messages, because a judge reads them."""
        return bool(self._rulers)

    def score_episode(self, episode: Episode) -> None:
        """Set what can be computed from the episode alone."""
        self._episode_scorer.score(episode)

    async def score(self, group: Group) -> None:
        """Set the rewards of a group's episodes. A judge's failure leaves them `unscored`.

        Raises:
            JudgeError, ConfigError: the run cannot go on.
        """
        for episode in group.episodes:
            self.score_episode(episode)
        for name, (ruler, term) in self._rulers.items():
            try:
                rulings = await ruler.judge_group(group)
            except NoVerdictError as failure:
                for episode in group.scored:
                    episode.unscored = f"reward.terms.{name}: {failure}"
                continue
            except BudgetSpentError:
                continue
            for episode in group.scored:
                if (ruling := rulings.get(episode.member)) is None:
                    continue
                episode.reward_terms[name] = ruling.value
                episode.judgements[name] = ruling.judgement
                episode.reward += term.weight * ruling.value
                episode.whole_reward += term.weight * ruling.value

    def accept(self, groups: Sequence[Group]) -> None:
        """Accept the verdicts of a step or an evaluation.

        Raises:
            JudgeError: the judge failed for a larger share than `judge.max_failed_share`.
        """
        if self._judge is None:
            return
        played = [e for group in groups for e in group.episodes if not e.failed]
        unscored = [episode for episode in played if episode.unscored is not None]
        limit = self._judge.max_failed_share
        if len(unscored) > limit * len(played):
            raise JudgeError(
                f"the judge gave no verdict for {len(unscored)} of {len(played)} episodes, more "
                f"than judge.max_failed_share={limit:g}; the last reason: "
                f"{unscored[-1].unscored}"
            )
        self._judge.keep_failures()
