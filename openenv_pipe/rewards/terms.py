"""The reward terms of single episodes. Such a term maps an episode to one value per turn.

A term's value for an episode is the sum over its turns. A term with `per_turn` credits each turn
with its own value; any other term credits the episode as a whole.
"""

import math
from collections.abc import Callable
from functools import partial

from openenv_pipe.config.schema import (
    BrevityTerm,
    EnvTerm,
    EpisodeTermConfig,
    LengthTerm,
    OverlongTerm,
    RegexTerm,
    SuccessTerm,
    TurnsTerm,
    UnusableTerm,
)
from openenv_pipe.errors import ConfigError
from openenv_pipe.rewards.values import NoValue, TermSources, TermValue, Values, check_number
from openenv_pipe.system.patterns import LimitedPattern, SlowPatternError
from openenv_pipe.types import Episode, Group

TermFunction = Callable[[Episode], list[float]]


def overlong(episode: Episode, *, limit_tokens: int, buffer_share: float) -> list[float]:
    """Return DAPO's soft overlong punishment, equation 13 of arXiv:2503.14476, in [-1, 0].

    It counts the tokens of the episode's longest branch, which env.max_episode_tokens limits.
    """
    left = limit_tokens - episode.num_branch_tokens
    return at_the_end(episode, min(0.0, max(-1.0, left / (buffer_share * limit_tokens) - 1.0)))


def _last_reward(episode: Episode) -> list[float]:
    return at_the_end(episode, episode.turns[-1].reward if episode.turns else 0.0)


def at_the_end(episode: Episode, value: float) -> list[float]:
    """Return the value of an episode as that of its last turn."""
    return [0.0] * (len(episode.turns) - 1) + [value] if episode.turns else []


class EpisodeTerm:
    """A term that is computed from each episode alone; a `rewards.values.GroupTerm`."""

    def __init__(self, name: str, term: EpisodeTermConfig, sources: TermSources) -> None:
        """Raises ConfigError if the term's function or pattern cannot be used."""
        self._name = name
        self._term = term
        self._function = _function(name, term)

    async def values(self, group: Group) -> Values:
        return {episode.member: self._value(episode) for episode in group.scored}

    def _value(self, episode: Episode) -> TermValue | NoValue:
        try:
            values = self._function(episode)
        except SlowPatternError as error:
            return NoValue(why=str(error))
        by_turn = [check_number(self._name, value, episode) for value in values]
        total = math.fsum(by_turn)
        return TermValue(credits=by_turn if self._term.per_turn else [total], total=total)


class BrevityOfGroup:
    """The length reward of Kimi k1.5 (section 2.3.3 of arXiv:2501.12599); a `GroupTerm`."""

    def __init__(self, name: str, term: BrevityTerm, sources: TermSources) -> None:
        """Everything that it needs is in the episodes."""

    async def values(self, group: Group) -> dict[int, TermValue]:
        if len(group.scored) < 2:
            return {}
        lengths = [episode.num_completion_tokens for episode in group.scored]
        shortest, spread = min(lengths), max(lengths) - min(lengths)
        found = {}
        for episode, length in zip(group.scored, lengths, strict=True):
            value = 0.5 - (length - shortest) / spread if spread else 0.0
            value = value if episode.success else min(0.0, value)
            found[episode.member] = TermValue(credits=[value], total=value)
        return found


def _function(name: str, term: EpisodeTermConfig) -> TermFunction:
    match term:
        case EnvTerm(use="sum"):
            return lambda episode: [turn.reward for turn in episode.turns]
        case EnvTerm():
            return _last_reward
        case SuccessTerm():
            return lambda episode: at_the_end(episode, float(episode.success))
        case TurnsTerm():
            return lambda episode: [1.0 for _ in episode.turns]
        case UnusableTerm():
            return lambda episode: [float(turn.unusable is not None) for turn in episode.turns]
        case LengthTerm():
            return lambda episode: [float(turn.num_completion_tokens) for turn in episode.turns]
        case OverlongTerm():
            return partial(overlong, limit_tokens=term.limit_tokens, buffer_share=term.buffer_share)
        case RegexTerm():
            pattern = _compiled(name, term.pattern)
            return lambda episode: [
                float(pattern.search(turn.reply) is not None) for turn in episode.turns
            ]


def _compiled(name: str, pattern: str) -> LimitedPattern:
    try:
        return LimitedPattern(pattern)
    except ValueError as error:
        raise ConfigError(
            f"reward.terms.{name}.pattern={pattern!r} is not a regex: {error}"
        ) from None
