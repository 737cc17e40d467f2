"""The reward terms and their weighted sum. A term maps an episode to one value per turn.

A term's value for an episode is the sum over its turns, or the mean with `use: mean`. A term with
`per_turn` credits each turn with its own value; any other term credits the episode as a whole.
"""

import math
import numbers
from collections.abc import Callable
from functools import partial
from typing import Any

from openenv_pipe.config.schema import (
    EnvTerm,
    EpisodeTermConfig,
    LengthTerm,
    OverlongTerm,
    PythonTerm,
    RegexTerm,
    RewardConfig,
    RulerTerm,
    SuccessTerm,
    TurnsTerm,
    UnusableTerm,
)
from openenv_pipe.environments.client.protocol import MAX_REWARD
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.patterns import LimitedPattern, SlowPatternError
from openenv_pipe.system.python_targets import call_problem
from openenv_pipe.system.resources import load_callable
from openenv_pipe.types import Episode

TermFunction = Callable[[Episode], list[float]]


def environment_sum(episode: Episode) -> list[float]:
    return [turn.reward for turn in episode.turns]


def environment_last(episode: Episode) -> list[float]:
    return _at_the_end(episode, episode.turns[-1].reward if episode.turns else 0.0)


def success(episode: Episode) -> list[float]:
    return _at_the_end(episode, float(episode.success))


def turns_used(episode: Episode) -> list[float]:
    return [1.0 for _ in episode.turns]


def unusable_replies(episode: Episode) -> list[float]:
    return [float(turn.unusable is not None) for turn in episode.turns]


def reply_length(episode: Episode) -> list[float]:
    return [float(turn.num_completion_tokens) for turn in episode.turns]


def overlong(episode: Episode, *, limit_tokens: int, buffer_share: float) -> list[float]:
    """Return DAPO's soft overlong punishment, equation 13 of arXiv:2503.14476, in [-1, 0]. It
    counts all tokens of the episode, because env.max_episode_tokens limits all of them."""
    left = limit_tokens - episode.num_tokens
    return _at_the_end(episode, min(0.0, max(-1.0, left / (buffer_share * limit_tokens) - 1.0)))


def matching_replies(episode: Episode, *, pattern: LimitedPattern) -> list[float]:
    return [float(_matches(pattern, turn.reply)) for turn in episode.turns]


def _matches(pattern: LimitedPattern, reply: str) -> bool:
    """Return whether the reply matches; one that takes too long to tell does not."""
    try:
        return pattern.search(reply) is not None
    except SlowPatternError:
        return False


def from_python(
    episode: Episode, *, name: str, function: Callable[..., Any], term: PythonTerm
) -> list[float]:
    """Return a user function's values per turn. A single number is the last turn's value."""
    try:
        value = function(episode, **term.keywords)
        is_number = isinstance(value, numbers.Real)
        values = [float(item) for item in ([value] if is_number else value)]
    except Exception as error:  # A user's function may raise anything.
        raise ConfigError(
            f"reward.terms.{name}.target={term.target!r} raised {type(error).__name__}: {error}; "
            f"it was called with an episode of task {episode.task.id} and {term.keywords}"
        ) from error
    if is_number:
        if term.use == "mean":
            raise ConfigError(
                f"reward.terms.{name}.target returned one number for the episode, and use=mean is "
                "for one per turn; set use=sum"
            )
        return _at_the_end(episode, values[0])
    if len(values) != len(episode.turns):
        raise ConfigError(
            f"reward.terms.{name}.target returned {len(values)} values for an episode of "
            f"{len(episode.turns)} turns; return one per turn, or a single number"
        )
    return values


def _at_the_end(episode: Episode, value: float) -> list[float]:
    return [0.0] * (len(episode.turns) - 1) + [value] if episode.turns else []


class EpisodeScorer:
    """Sets success, reward, reward terms and per-turn rewards of episodes, in place.

    The terms that need a judge are left out; `scoring.Scorer` adds them.
    """

    def __init__(self, config: RewardConfig, success_reward: float) -> None:
        self._terms = {
            name: term for name, term in config.terms.items() if not isinstance(term, RulerTerm)
        }
        self._functions = {name: _function(name, term) for name, term in self._terms.items()}
        self._success_reward = success_reward

    def score(self, episode: Episode) -> None:
        """Set the episode's rewards and success. A failed episode keeps zeros: nothing uses it."""
        if episode.failed:
            return
        episode.success = math.fsum(turn.reward for turn in episode.turns) >= self._success_reward
        if any(term.per_turn for term in self._terms.values()):
            episode.turn_rewards = [0.0] * len(episode.turns)
        for name, term in self._terms.items():
            self._add(episode, name, term)

    def _add(self, episode: Episode, name: str, term: EpisodeTermConfig) -> None:
        values = self._functions[name](episode)
        for value in values:
            if not abs(value) <= MAX_REWARD:  # NaN compares as False.
                raise ConfigError(
                    f"reward.terms.{name} gave {value!r:.80}, expected a finite number of at "
                    f"most {MAX_REWARD:g} in size"
                )
        total = math.fsum(values)
        if isinstance(term, PythonTerm) and term.use == "mean":
            total /= max(1, len(values))
        episode.reward_terms[name] = total
        episode.reward += term.weight * total
        if not term.per_turn:
            episode.whole_reward += term.weight * total
            return
        episode.turn_rewards = [
            so_far + term.weight * value
            for so_far, value in zip(episode.turn_rewards, values, strict=True)
        ]


def _function(name: str, term: EpisodeTermConfig) -> TermFunction:
    match term:
        case EnvTerm():
            return environment_sum if term.use == "sum" else environment_last
        case SuccessTerm():
            return success
        case TurnsTerm():
            return turns_used
        case UnusableTerm():
            return unusable_replies
        case LengthTerm():
            return reply_length
        case OverlongTerm():
            return partial(overlong, limit_tokens=term.limit_tokens, buffer_share=term.buffer_share)
        case RegexTerm():
            return partial(matching_replies, pattern=_compiled(name, term.pattern))
        case PythonTerm():
            return partial(from_python, name=name, function=_load_function(name, term), term=term)


def _load_function(name: str, term: PythonTerm) -> Callable[..., Any]:
    """Import a term's function. Raises ConfigError if it does not accept the term's keywords."""
    function = load_callable(term.target)
    if problem := call_problem(function, None, **term.keywords):
        raise ConfigError(
            f"reward.terms.{name}.target={term.target!r} cannot be called with an episode and the "
            f"keywords {term.keywords}: {problem}"
        )
    return function


def _compiled(name: str, pattern: str) -> LimitedPattern:
    try:
        return LimitedPattern(pattern)
    except ValueError as error:
        raise ConfigError(
            f"reward.terms.{name}.pattern={pattern!r} is not a regex: {error}"
        ) from None
