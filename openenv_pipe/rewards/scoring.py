"""Score the episodes of a group: ask all terms for their values, and compose the rewards."""

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from openenv_pipe.config.schema import NoJudgeConfig, RewardConfig, RunConfig
from openenv_pipe.errors import JudgeError
from openenv_pipe.registry import block_types, load
from openenv_pipe.rewards.composition import compose_rewards
from openenv_pipe.rewards.values import (
    GroupTerm,
    Judge,
    NoValue,
    OpenedTerm,
    TermSources,
    scoring,
)
from openenv_pipe.system.tasks import run_all
from openenv_pipe.types import Group


class Scorer:
    """Sets success, rewards and reward terms of episodes, in place."""

    def __init__(
        self,
        config: RewardConfig,
        success_reward: float,
        judge: Judge | None = None,
        opened: Mapping[str, OpenedTerm] | None = None,
    ) -> None:
        """A term is left out of the reward if its judge is missing or it is not opened.

        opened: the terms that `open_scorer` has opened, by name.

        Raises ConfigError if the function or the pattern of a term cannot be used.
        """
        self._success_reward = success_reward
        self._judge = judge
        self._judged = config.judged
        self._opened = opened or {}
        sources = TermSources(judge=judge, opened=self._opened)
        types = block_types("reward.terms")
        terms: dict[str, GroupTerm | None] = {
            name: load(types[term.type].build)(name, term, sources)
            for name, term in config.terms.items()
        }
        self._terms = {name: term for name, term in terms.items() if term is not None}
        kept = {name: config.terms[name] for name in self._terms}
        self._config = config.model_copy(update={"terms": kept})
        # Why terms have no value, until `accept`: by term, group and member.
        self._failures: dict[tuple[str, str, int], str] = {}

    @property
    def reads_messages(self) -> bool:
        """Whether a judge or an opened term reads the messages of episodes."""
        return (self._judge is not None and bool(self._judged)) or bool(self._opened)

    async def score(self, group: Group) -> None:
        """Set the rewards of a group's episodes. A failed episode keeps zeros: nothing uses it.

        Where a term has no value, because a judge has failed, the episode is left `unscored`.

        Raises JudgeError, ConfigError: the run cannot go on.
        """
        for episode in group.scored:
            total = math.fsum(turn.reward for turn in episode.turns)
            is_played = bool(episode.turns) or not episode.status.is_limit
            episode.success = is_played and total >= self._success_reward
        with scoring(group):
            found = await run_all(term.values(group) for term in self._terms.values())
        values = dict(zip(self._terms, found, strict=True))
        compose_rewards(self._config, group, values)
        self._failures |= {
            (name, group.id, member): value.why
            for name, each in values.items()
            for member, value in each.items()
            if isinstance(value, NoValue) and value.is_failure
        }

    def accept(self, groups: Sequence[Group]) -> None:
        """Accept the verdicts of a step or an evaluation.

        Raises JudgeError: the judge failed for a larger share than `judge.max_failed_share`, or an
        opened term for a larger one than its own.
        """
        num_played = sum(not e.failed for group in groups for e in group.episodes)
        asked: list[OpenedTerm | Judge] = [
            *self._opened.values(),
            *([self._judge] if self._judge is not None else []),
        ]
        ids = {group.id for group in groups}
        try:
            for name, term in self._opened.items():
                term.check(num_played, self._reasons(groups, name))
            if self._judge is not None:
                reasons, limit = self._reasons(groups, *self._judged), self._judge.max_failed_share
                if len(reasons) > limit * num_played:
                    raise JudgeError(
                        f"the judge gave no verdict for {len(reasons)} of {num_played} episodes, "
                        f"more than judge.max_failed_share={limit:g}; the last reason: "
                        f"{reasons[-1]}"
                    )
        except JudgeError:
            for each in asked:
                each.settle(ids, goes_on=False)
            raise
        for each in asked:
            each.settle(ids, goes_on=True)

    def _reasons(self, groups: Sequence[Group], *names: str) -> list[str]:
        """Return for each episode that lacks the value of one of these terms the first reason."""
        reasons = []
        for group in groups:
            for episode in group.episodes:
                keys = [(name, group.id, episode.member) for name in names]
                found = [self._failures.pop(key) for key in keys if key in self._failures]
                reasons += found[:1]
        return reasons


@asynccontextmanager
async def open_scorer(
    config: RunConfig, folder: Path, *others: Path, log: Path | None = None
) -> AsyncIterator[Scorer]:
    """Open the scorer of a run, with its judge and the terms that ask others.

    The `build` of a judge's type is called with its configuration and the arguments below, and
    gives the judge in an asynchronous context manager. So does the `open` of a term's type, which
    is called with the term's name, its configuration and the folders.

    Args:
        folder: for their answers; it is made if anything is asked.
        others: such folders of other runs, which are only read.
        log: of the judge's own server.
    """
    open_judge = load(block_types("judge")[config.judge.type].build)
    types = block_types("reward.terms")
    async with (
        open_judge(config.judge, folder, *others, log=log) as judge,
        AsyncExitStack() as stack,
    ):
        opened = {
            name: await stack.enter_async_context(
                load(types[term.type].open)(name, term, folder, *others)
            )
            for name, term in config.reward.terms.items()
            if types[term.type].open
        }
        yield Scorer(config.reward, config.env.success_reward, judge, opened)


@asynccontextmanager
async def no_judge(
    config: NoJudgeConfig, folder: Path, *others: Path, log: Path | None = None
) -> AsyncIterator[None]:
    """Give no judge, as `judge=none` says."""
    yield
