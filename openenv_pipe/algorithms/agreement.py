"""How a judge's values agree with the environment's reward, and what else they follow.

All of it is measured within groups, because GRPO compares the episodes of a group only. A measure
has a value for each group in which it exists, so that intervals can resample groups.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import fmean

from openenv_pipe.types import Episode, Group

MEASURES = ("rank_correlation", "auc", "length_bias", "position_bias")


def agreement_of(groups: Iterable[Group], term: str) -> dict[str, list[float]]:
    """Measure the values of a reward term that a judge decides, for each group.

    rank_correlation  Spearman's, of the judge's values and the environment's rewards
    auc               share of the pairs with different rewards in which the judge prefers the
                      better episode; a tie of the judge counts half. 0.5: no better than chance
    length_bias       the rank correlation of values with lengths of what the model wrote, minus
                      that of rewards with lengths. Above 0: the judge prefers long episodes
    position_bias     what showing an episode last instead of first in the prompt adds to its score

    The first two exist in groups whose rewards differ. A measure without any value is left out.
    """
    found: dict[str, list[float]] = {name: [] for name in MEASURES}
    for group in groups:
        judged = [
            each for each in group.scored if term in each.judgements and term in each.reward_terms
        ]
        values = [episode.reward_terms[term] for episode in judged]
        rewards = [environment_reward(episode) for episode in judged]
        lengths = [float(episode.num_completion_tokens) for episode in judged]
        in_group = {
            "rank_correlation": rank_correlation(values, rewards),
            "auc": pairwise_auc(values, rewards),
            "length_bias": _length_bias(values, rewards, lengths),
            "position_bias": _position_bias(judged, term),
        }
        for name, value in in_group.items():
            if value is not None:
                found[name].append(value)
    return {name: values for name, values in found.items() if values}


def environment_reward(episode: Episode) -> float:
    """Return what the environment itself paid for the episode."""
    return math.fsum(turn.reward for turn in episode.turns)


def rank_correlation(values: Sequence[float], truth: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; None if `truth` is constant.

    Constant values say nothing about a truth that is not constant: 0.0.
    """
    if len(set(truth)) < 2:
        return None
    if len(set(values)) < 2:
        return 0.0
    return _correlation(_ranks(values), _ranks(truth))


def pairwise_auc(values: Sequence[float], truth: Sequence[float]) -> float | None:
    """Return the probability that of two episodes the better one has the larger value.

    With a truth of two values, such as success, this is the area under the ROC curve. None if
    `truth` is constant.
    """
    wins = []
    for (value, true), (other, other_true) in combinations(zip(values, truth, strict=True), 2):
        if true != other_true:
            difference = (value - other) if true > other_true else (other - value)
            wins.append(0.5 if difference == 0.0 else float(difference > 0.0))
    return fmean(wins) if wins else None


def _length_bias(
    values: Sequence[float], rewards: Sequence[float], lengths: Sequence[float]
) -> float | None:
    of_values = rank_correlation(values, lengths)
    of_rewards = rank_correlation(rewards, lengths)
    return None if of_values is None or of_rewards is None else of_values - of_rewards


def _position_bias(episodes: Sequence[Episode], term: str) -> float | None:
    """Return the slope of the scores over the positions in the prompt, by least squares.

    With several orders an episode is compared with itself; with one, with the rest of its group,
    in which positions are random.
    """
    shown = [
        list(zip(judgement.positions, judgement.scores, strict=False))
        for judgement in (episode.judgements[term] for episode in episodes)
    ]
    if all(len(orders) == 1 for orders in shown):
        shown = [[order for orders in shown for order in orders]]
    products, squares = [], []
    for orders in shown:
        if not orders:
            continue
        middle, level = (fmean(column) for column in zip(*orders, strict=True))
        products += [(position - middle) * (score - level) for position, score in orders]
        squares += [(position - middle) ** 2 for position, _ in orders]
    total = math.fsum(squares)
    return math.fsum(products) / total if total > 0.0 else None


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of their ranks."""
    ordered = sorted(values)
    first: dict[float, int] = {}
    count = dict.fromkeys(ordered, 0)
    for place, value in enumerate(ordered):
        first.setdefault(value, place)
        count[value] += 1
    return [first[value] + (count[value] - 1) / 2 for value in values]


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Pearson's correlation of values that are not constant."""
    mean_first, mean_second = fmean(first), fmean(second)
    products = [(a - mean_first) * (b - mean_second) for a, b in zip(first, second, strict=True)]
    squares = math.fsum((a - mean_first) ** 2 for a in first) * math.fsum(
        (b - mean_second) ** 2 for b in second
    )
    return math.fsum(products) / math.sqrt(squares)
