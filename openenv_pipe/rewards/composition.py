"""Compose the rewards of a group: transform the values of the terms, add and multiply them."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

from openenv_pipe.algorithms.credit import trained_turn_rewards
from openenv_pipe.config.schema import (
    ClipTransform,
    MultiplyTransform,
    OnlySuccessTransform,
    RewardConfig,
    StandardiseTransform,
    Term,
    TransformConfig,
)
from openenv_pipe.rewards.values import NoValue, TermValue, Values
from openenv_pipe.types import Episode, Group

ZERO_SPREAD = 1e-8  # standard deviations below this are rounding


def compose_rewards(config: RewardConfig, group: Group, values: Mapping[str, Values]) -> None:
    """Set the rewards, terms and judgements of a group's episodes, in place.

    An episode for which a term has no value becomes `unscored`, and nothing is compared with it. A
    term of weight 0 is only recorded: the rewards are as without it.

    values: those of each term, by its name.
    """
    for name, term in config.terms.items():
        _record(name, group, values[name], counts=term.weight != 0)
    if any(term.per_turn and term.weight for term in config.terms.values()):
        for episode in group.scored:
            episode.turn_rewards = [0.0] * len(episode.turns)
    factors = []
    for name, term in config.terms.items():
        found = [(episode, values[name].get(episode.member)) for episode in group.scored]
        valued = [(episode, value) for episode, value in found if isinstance(value, TermValue)]
        transforms = config.transforms.get(name, [])
        credits = [value.credits for _, value in valued]
        for transform in transforms:
            credits = _transformed(transform, [episode for episode, _ in valued], credits)
        for (episode, value), credited in zip(valued, credits, strict=True):
            total = math.fsum(credited) if transforms else value.total
            if transforms:
                episode.reward_terms[f"{name}/transformed"] = total
            if any(isinstance(each, MultiplyTransform) for each in transforms):
                factors.append((episode, total))
            else:
                _add(episode, term, credited, total)
    for episode, factor in factors:  # after all terms have been added
        episode.reward *= factor
        episode.whole_reward *= factor
        episode.turn_rewards = [value * factor for value in episode.turn_rewards]
    for episode in group.scored:
        episode.turn_rewards = trained_turn_rewards(episode)


def _record(name: str, group: Group, values: Values, *, counts: bool) -> None:
    """Record the values of a term and its parts, or why there is none if the term counts."""
    for episode in group.episodes:
        match values.get(episode.member):
            case TermValue() as value:
                episode.reward_terms[name] = value.total
                for part, number in value.parts.items():
                    episode.reward_terms[f"{name}/{part}"] = number
                if value.judgement is not None:
                    episode.judgements[name] = value.judgement
            case NoValue() as none if counts and episode.unscored is None:
                start = f"reward.terms.{name}" if none.is_failure else f"without {name}"
                episode.unscored = f"{start}: {none.why}"


def _transformed(
    transform: TransformConfig, episodes: Sequence[Episode], credits: list[list[float]]
) -> list[list[float]]:
    """Return what the episodes are credited with after one transform."""
    match transform:
        case ClipTransform(low=low, high=high):
            lowest = -math.inf if low is None else low
            highest = math.inf if high is None else high
            return [[min(highest, max(lowest, each)) for each in values] for values in credits]
        case OnlySuccessTransform():
            return [
                values if episode.success else [0.0] * len(values)
                for episode, values in zip(episodes, credits, strict=True)
            ]
        case StandardiseTransform():
            return [[each] for each in _standardised([value for (value,) in credits])]
        case MultiplyTransform():
            return credits


def _standardised(values: Sequence[float]) -> list[float]:
    if not values:
        return []
    mean, deviation = fmean(values), pstdev(values)
    if deviation < ZERO_SPREAD:
        return [0.0] * len(values)
    return [(value - mean) / deviation for value in values]


def _add(episode: Episode, term: Term, credits: Sequence[float], total: float) -> None:
    if not term.weight:
        return
    episode.reward += term.weight * total
    if not term.per_turn:
        episode.whole_reward += term.weight * total
        return
    episode.turn_rewards = [
        so_far + term.weight * value
        for so_far, value in zip(episode.turn_rewards, credits, strict=True)
    ]
