"""Compute the metrics of a step's episodes."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev

from openenv_pipe.algorithms.agreement import agreement_of
from openenv_pipe.algorithms.credit import trained_turns
from openenv_pipe.rollout.context import OPPONENT, PLAYER
from openenv_pipe.types import CUT_BY_REQUEST, IMAGE_IDS, PREVIOUS, Episode, Group, Status, TurnRole

# UUIDs, long hexadecimal ids, and times of day with the date before them.
VOLATILE = re.compile(
    r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|\b[0-9a-fA-F]{24,}\b"
    r"|\b(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
)

# Metrics that are also reported for each of several environments.
OF_AN_ENVIRONMENT = (
    *("success/rate", "turns/mean", "replies/unusable", "groups/trained"),
    *("episodes/count", "episodes/failed", "episodes/truncated", "tokens/sampled"),
    *("reply/tokens_mean", "sampling/entropy"),
)


def summarise_groups(groups: Sequence[Group]) -> dict[str, float]:
    """Return counts and means over the scored episodes; failed ones are only counted.

    `reply/tokens_mean` is in tokens per turn, `turns/mean` in turns per episode, `replies/unusable`
    a fraction of all turns. Means and extremes are absent where no episode was scored.
    """
    everyone = [episode for group in groups for episode in group.episodes]
    scored = [episode for group in groups for episode in group.scored]
    metrics: dict[str, float] = {
        "episodes/count": len(everyone),
        "episodes/failed": sum(episode.failed for episode in everyone),
        "episodes/truncated": sum(episode.truncated for episode in scored),
        # A game may end before the first turn of one of its players.
        "episodes/untrained": sum(
            not trained_turns(episode) for episode in scored if PLAYER not in episode.task.labels
        ),
        "tokens/sampled": sum(episode.num_completion_tokens for episode in everyone),
    }
    if num_cut := sum(CUT_BY_REQUEST in episode.notes for episode in scored):
        metrics["episodes/cut_by_request"] = num_cut
    if num_late := sum(episode.timed_out for episode in everyone):
        metrics["episodes/timed_out"] = num_late
    metrics |= _summarise_judging(everyone) | _summarise_clients(groups)
    for name in dict.fromkeys(name for episode in scored for name in episode.judgements):
        for measure, values in agreement_of(groups, name).items():
            metrics[f"judge/{name}/{measure}"] = fmean(values)
    metrics |= _summarise_sampling(everyone)
    if not scored:
        return metrics
    rewards = [episode.reward for episode in scored]
    lengths = [episode.num_tokens for episode in scored]
    replies = [turn for episode in scored for turn in episode.turns]
    num_turns = len(replies)
    metrics |= {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "success/rate": fmean(episode.success for episode in scored),
        "turns/mean": num_turns / len(scored),
        "episodes/tokens_mean": fmean(lengths),
        "episodes/tokens_max": max(lengths),
        "replies/unusable": sum(turn.unusable is not None for turn in replies) / max(1, num_turns),
        "reply/truncated": sum(turn.is_cut_off for turn in replies),
        "reply/tokens_mean": sum(e.num_completion_tokens for e in scored) / max(1, num_turns),
    }
    metrics |= _summarise_branches(scored) | _summarise_players(scored)
    for name in dict.fromkeys(name for episode in scored for name in episode.reward_terms):
        values = [e.reward_terms[name] for e in scored if name in e.reward_terms]
        metrics[f"reward/{name}"] = fmean(values)
    return metrics


def summarise_environment(groups: Sequence[Group], num_signals: int) -> dict[str, float]:
    """Return the main metrics of one of several environments, from its groups.

    num_signals: how many of the groups have a learning signal.
    """
    found = summarise_groups(groups) | {"groups/trained": num_signals}
    return {
        name: value
        for name, value in found.items()
        if name in OF_AN_ENVIRONMENT or name.startswith("reward/")
    }


def _summarise_sampling(episodes: Sequence[Episode]) -> dict[str, float]:
    """Estimate the entropy of the distribution that all tokens were sampled from.

    A token's surprisal, minus its logprob, is an unbiased estimate of the entropy.
    """
    logprobs = [
        logprob
        for episode in episodes
        for turn in episode.turns
        for logprob in turn.logprobs
        if math.isfinite(logprob)
    ]
    return {"sampling/entropy": -math.fsum(logprobs) / len(logprobs)} if logprobs else {}


def summarise_skipped(groups: Sequence[Group]) -> dict[str, float]:
    """Count why groups without a learning signal have none."""
    compared = [group.scored for group in groups if len(group.scored) > 1]
    successes = [{episode.success for episode in scored} for scored in compared]
    return {
        "skipped/identical": sum(len(set(map(_written, scored))) == 1 for scored in compared),
        "skipped/solved": successes.count({True}),
        "skipped/unsolved": successes.count({False}),
    }


def _written(episode: Episode) -> tuple[tuple[int, ...] | str, ...]:
    """Return what the model wrote in an episode; engines of messages report no token ids."""
    return tuple(tuple(turn.completion_ids) or turn.reply for turn in episode.turns)


def count_unlike_prompts(groups: Sequence[Group], text_of: Callable[[list[int]], str]) -> int:
    """Count the groups whose members were shown different first prompts, though of one task.

    Ids and clocks in a prompt, which differ by nature, are not a difference. Images are compared by
    their pixels. Games are left out: what others did before a player's first turn may differ.
    text_of: decodes token ids.
    """

    def shown(prompt_ids: Sequence[int]) -> tuple[str, list[int]]:
        words = [each for each in prompt_ids if each < IMAGE_IDS]
        images = [each for each in prompt_ids if each >= IMAGE_IDS]
        return VOLATILE.sub("", text_of(words)), images

    def differ(group: Group) -> bool:
        prompts = [each.turns[0].prompt_ids for each in group.episodes if each.turns]
        others = [each for each in prompts[1:] if each != prompts[0]]
        return any(shown(each) != shown(prompts[0]) for each in others)

    return sum(differ(group) for group in groups if PLAYER not in group.task.labels)


def _summarise_branches(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return how episodes branch; nothing if no turn says which one it continues."""
    turns = [turn for episode in episodes for turn in episode.turns]
    if all(turn.parent == PREVIOUS for turn in turns):
        return {}
    return {
        "episodes/branched": sum(len(episode.branches) > 1 for episode in episodes),
        "turns/untrained": fmean(turn.role is not TurnRole.AGENT for turn in turns),
    }


def _summarise_players(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return how each trained player of a game does; nothing without a game."""
    players: dict[str, list[Episode]] = {}
    for episode in episodes:
        if (player := episode.task.labels.get(PLAYER)) is not None:
            players.setdefault(player, []).append(episode)
    metrics = {}
    for player, played in sorted(players.items()):
        metrics[f"player/{player}/reward"] = fmean(episode.reward for episode in played)
        metrics[f"player/{player}/success"] = fmean(episode.success for episode in played)
    if played := [episode for episode in episodes if OPPONENT in episode.task.labels]:
        metrics["league/reward"] = fmean(episode.reward for episode in played)
        metrics["league/success"] = fmean(episode.success for episode in played)
    return metrics


def _summarise_clients(groups: Sequence[Group]) -> dict[str, float]:
    """Return how many episodes clients did not play to the end; nothing if there are none."""
    counts = Counter(episode.status for group in groups for episode in group.episodes)
    unplayed = {f"clients/{s.removeprefix('client_')}": counts[s] for s in Status if s.is_of_client}
    if not any(unplayed.values()):
        return {}
    return {**unplayed, "groups/dropped": sum(len(group.scored) < 2 for group in groups)}


def _summarise_judging(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return what the judge did; nothing if it was not asked."""
    judgements = [each for episode in episodes for each in episode.judgements.values()]
    num_failed = sum(episode.unscored is not None for episode in episodes)
    if not judgements and not num_failed:
        return {}
    return {
        "judge/failed": num_failed,
        "judge/calls": sum(each.num_calls for each in judgements),
        "judge/tokens": sum(each.num_tokens for each in judgements),
        "judge/cost": math.fsum(each.cost for each in judgements),
    }


def summarise_signal(
    num_signals: int, num_groups: int, metrics: Mapping[str, float]
) -> dict[str, float]:
    """Return how many groups have a learning signal, and per episode and token (OpenEnv, RFC 013).

    metrics: of the step's groups, from `summarise_groups`.
    """
    signals: dict[str, float] = {
        "groups/trained": num_signals,
        "groups/skipped": num_groups - num_signals,
    }
    if num_episodes := metrics["episodes/count"]:
        signals["signal/per_episode"] = num_signals / num_episodes
    if num_tokens := metrics["tokens/sampled"]:
        signals["signal/per_1000_tokens"] = 1000 * num_signals / num_tokens
    return signals


def summarise_staleness(groups: Sequence[Group], *, version: int) -> dict[str, float]:
    """Return by how many versions the sampling weights lag behind `version`, which is trained.

    The mean is over sampled tokens of scored episodes, each with the oldest version of its turn.
    """
    turns = [turn for group in groups for episode in group.scored for turn in episode.turns]
    ages = [version - min(turn.policy_versions) for turn in turns]
    counts = [turn.num_completion_tokens for turn in turns]
    if not sum(counts):
        return {}
    total = sum(age * count for age, count in zip(ages, counts, strict=True))
    return {"staleness/mean": total / sum(counts), "staleness/max": max(ages)}
