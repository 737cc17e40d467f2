"""`judge check`: measure a judge on recorded episodes, beside the environment's own reward."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from openenv_pipe.algorithms.agreement import agreement_of, environment_reward, rank_correlation
from openenv_pipe.commands.findings import Line, Result
from openenv_pipe.commands.recorded_groups import recorded_groups, recorded_steps, without_rewards
from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import RewardConfig, RunConfig
from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.extras.judges.schema import RulerTerm
from openenv_pipe.registry import block_types, load
from openenv_pipe.rewards import Scorer
from openenv_pipe.runs.find import find_run, split_runs_dir
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.places import default_folder
from openenv_pipe.system.intervals import FRACTIONS, Bounds, Interval, bootstrap_interval
from openenv_pipe.system.tasks import run_all
from openenv_pipe.types import Episode, Group, Judgement

CORRELATIONS: Bounds = (-1.0, 1.0)
MEASURES: Mapping[str, Bounds] = {  # of `agreement_of`, with the bounds of their values
    "rank_correlation": CORRELATIONS,
    "auc": FRACTIONS,
    "length_bias": (-2.0, 2.0),  # a difference of two correlations
    "position_bias": CORRELATIONS,
}
CONFIDENCE = 0.95
NUM_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A run with recorded episodes, and the configuration of the judge that will read them."""

    folder: RunFolder
    config: RunConfig  # its `judge` and `reward` score the episodes
    output: Path  # the folder of the judge's answers; nothing is written into the run's own


def find_recorded(words: Sequence[str], output: Path | None, *, trust: bool) -> Recorded:
    """Find the run and the judge that the words name: `RUN OVERRIDES`, or `conf=NAME OVERRIDES`.

    With `conf=NAME` judge and reward are that experiment's, and the run, if none is named, is its
    newest. Otherwise they are the run's own, with the overrides.

    Raises RunFolderError and ConfigError.
    """
    runs = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    runs_dir = split_runs_dir(overrides)[0]
    has_experiment = any(word.startswith("conf=") for word in overrides)
    if len(runs) > 1 or not (runs or has_experiment):
        raise ConfigError(
            f"got {len(runs)} runs; name the run whose episodes are judged, or conf=NAME for the "
            "newest run of that experiment"
        )
    if has_experiment:
        config = compose(overrides).config
        is_default = Path(config.runs_dir) == default_folder()
        named = runs_dir or (None if is_default else Path(config.runs_dir))
        folder = find_run(runs[0] if runs else f"{config.name}/latest", named)
    else:
        folder = find_run(runs[0], runs_dir)
        config = folder.config_to_run(
            split_runs_dir(overrides)[1], trust=trust, secrets_of=["reward", "judge"]
        )
    if not config.judge.answers:
        raise ConfigError(
            "there is no judge; name one and the reward that asks it, as in: reward=ruler "
            "judge=openai judge.model=gpt-5-mini"
        )
    beside = folder.path.with_name(f"{folder.path.name}_judged")
    return Recorded(folder=folder, config=config, output=output or beside)


async def score_again(
    recorded: Recorded, groups: Sequence[Group], reward: RewardConfig, repeat: int = 0
) -> list[Group]:
    """Return copies of the groups with the rewards that the judge gives now.

    The run's answers of the same judge to the same question are reused.

    repeat: 0, or a number with which the same is asked again. Raises JudgeError and ConfigError.
    """
    scored = [without_rewards(group) for group in groups]
    folders = (recorded.output / "verdicts", recorded.folder.verdicts)
    log = recorded.output / "judge.log"
    judge = recorded.config.judge
    open_judge = load(block_types("judge")[judge.type].build)
    again = {"repeat": repeat} if repeat else {}
    async with open_judge(judge, *folders, log=log, **again) as opened:
        scorer = Scorer(reward, recorded.config.env.success_reward, opened)
        if not scorer.reads_messages:
            raise ConfigError(
                f"none of the reward terms ({', '.join(reward.terms)}) asks a judge; choose one "
                "that does, as in reward=ruler"
            )
        await run_all(scorer.score(group) for group in scored)
    return scored


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a judge has to reach; a line beyond its limit has failed."""

    min_auc: float
    min_self_correlation: float
    max_position_bias: float
    max_length_bias: float
    max_failed_share: float


async def check_judge(
    recorded: Recorded,
    limits: Limits,
    *,
    step: int | None,
    num_groups: int,
    num_orders: int,
    num_repeats: int,
) -> list[Line]:
    """Let the judge score recorded groups in several orders and again, and report the findings.

    step: whose episodes are judged; None: of all steps, evenly.
    num_orders: in which the episodes of a group are shown.
    num_repeats: how often everything is asked again in the first order.

    Raises RunFolderError, JudgeError and ConfigError.
    """
    groups = _choose(recorded, step, num_groups)
    reward = recorded.config.reward
    first = await score_again(recorded, groups, _with_orders(reward, num_orders))
    once = _with_orders(reward, 1)
    repeats = [
        await score_again(recorded, groups, once, repeat=number)
        for number in range(1, num_repeats + 1)
    ]
    lines = [_failures(first, limits)]
    judged = [name for group in first for each in group.episodes for name in each.judgements]
    for term in dict.fromkeys(judged):
        lines += _agreement(first, term, limits)
        lines += _with_itself(first, repeats, term, limits)
        lines.append(_cost(first, term))
    return lines


def _choose(recorded: Recorded, step: int | None, num_groups: int) -> list[Group]:
    """Return groups of the step, or of steps that are spread over the run.

    Groups in which the environment's rewards differ are preferred, because the others cannot say
    whether the judge agrees with it.
    """
    steps = [step] if step is not None else recorded_steps(recorded.folder)
    num_steps = min(num_groups, len(steps))
    spread = [steps[place * len(steps) // num_steps] for place in range(num_steps)]
    per_step = math.ceil(num_groups / num_steps)
    chosen = []
    for each in spread:
        played = [
            group
            for group in recorded_groups(recorded.folder, each)
            if sum(not episode.failed for episode in group.episodes) > 1
        ]
        played.sort(  # stable: groups whose rewards differ come first
            key=lambda group: (
                len({environment_reward(each) for each in group.episodes if not each.failed}) < 2
            )
        )
        chosen += played[:per_step]
    if not chosen:
        raise RunFolderError(
            f"steps {spread[0]} to {spread[-1]} of {recorded.folder.path} have no group with two "
            "episodes that did not fail; choose another step with --step"
        )
    return chosen[:num_groups]


def _with_orders(reward: RewardConfig, num_orders: int) -> RewardConfig:
    """Return the reward with this number of orders in the terms that show several episodes."""
    terms = {
        name: term.model_copy(update={"num_orders": num_orders})
        if isinstance(term, RulerTerm)
        else term
        for name, term in reward.terms.items()
    }
    return reward.model_copy(update={"terms": terms})


def _failures(groups: Sequence[Group], limits: Limits) -> Line:
    played = [each for group in groups for each in group.episodes if not each.failed]
    failed = [each.unscored for each in played if each.unscored is not None]
    share = len(failed) / len(played)
    text = f"no verdict for {len(failed)} of {len(played)} episodes in {len(groups)} groups"
    if failed:
        text += f"; the last reason: {failed[-1]}"
    is_bad = share > limits.max_failed_share
    return _line("failures", is_bad, text, {"failed_share": share, "groups": len(groups)})


def _agreement(groups: Sequence[Group], term: str, limits: Limits) -> list[Line]:
    values = agreement_of(groups, term)
    found = {name: _interval(values[name], MEASURES[name]) for name in values}
    over = {name: _over(len(values[name])) for name in values}
    lines = []
    auc, correlation = found.get("auc"), found.get("rank_correlation")
    if auc and correlation:
        text = (
            f"rank correlation {correlation:.3f} with the environment's reward; of two episodes "
            f"the better one is preferred in {auc:.3f} of the pairs (AUC), {over['auc']}"
        )
        numbers = _numbers("rank_correlation", correlation) | _numbers("auc", auc)
        lines.append(_line(f"{term}: agreement", auc.mean < limits.min_auc, text, numbers))
    else:
        text = "could not be measured: no group whose rewards differ"
        lines.append(Line(f"{term}: agreement", Result.WARN, text))
    last = "showing an episode last instead of first changes its score by"
    long = (
        "rank correlation with the length of what the model wrote, beyond that of the "
        "environment's reward:"
    )
    for kind, what, limit in (
        ("position", last, limits.max_position_bias),
        ("length", long, limits.max_length_bias),
    ):
        name = f"{kind}_bias"
        if bias := found.get(name):
            text = f"{what} {bias:+.3f}, {over[name]}"
            is_bad = abs(bias.mean) > limit
            lines.append(_line(f"{term}: {kind} bias", is_bad, text, _numbers(name, bias)))
    return lines


def _with_itself(
    groups: Sequence[Group], repeats: Sequence[Sequence[Group]], term: str, limits: Limits
) -> list[Line]:
    """Compare the judge's scores of the same episodes in other orders, and when asked again."""
    pairs: dict[str, list[tuple[list[float], list[float]]]] = {"orders": [], "repeats": []}
    for place, group in enumerate(groups):
        scores = _scores(group, term)
        by_order = list(zip(*scores.values(), strict=True))
        pairs["orders"] += [(list(a), list(b)) for a, b in combinations(by_order, 2)]
        for repeat in repeats:
            again = _scores(repeat[place], term)
            both = [member for member in scores if member in again]
            pairs["repeats"].append(
                ([scores[each][0] for each in both], [again[each][0] for each in both])
            )
    lines = []
    for kind, compared in pairs.items():
        correlations = [_self_correlation(a, b) for a, b in compared if len(a) > 1]
        if (correlation := _interval(correlations, CORRELATIONS)) is None:
            continue
        differences = [abs(x - y) for a, b in compared for x, y in zip(a, b, strict=True)]
        text = (
            f"rank correlation {correlation:.3f} with itself, scores differ by "
            f"{fmean(differences):.3f} on average"
        )
        numbers = _numbers("rank_correlation", correlation)
        numbers["mean_difference"] = fmean(differences)
        is_bad = correlation.mean < limits.min_self_correlation
        lines.append(_line(f"{term}: {kind}", is_bad, text, numbers))
    return lines


def _scores(group: Group, term: str) -> dict[int, list[float]]:
    return {
        each.member: each.judgements[term].scores or [each.reward_terms[term]]
        for each in group.scored
        if term in each.judgements
    }


def _self_correlation(first: list[float], second: list[float]) -> float:
    """Return the rank correlation; for constant scores, 1.0 if both are constant, else 0.0."""
    if len(set(second)) < 2:
        return float(len(set(first)) < 2)
    return rank_correlation(first, second) or 0.0


def _cost(groups: Sequence[Group], term: str) -> Line:
    episodes = [each for group in groups for each in group.scored if term in each.judgements]
    per_order: dict[str, float] = {
        f"{name}_per_episode": math.fsum(_one_order(each, term, name) for each in episodes)
        / len(episodes)
        for name in ("num_calls", "num_tokens", "cost")
    }
    calls, tokens, cost = per_order.values()
    text = f"an episode takes {calls:.3g} calls and {tokens:.0f} tokens, and costs {cost:.3g}"
    return Line(f"{term}: cost", Result.OK, text, per_order)


def _one_order(episode: Episode, term: str, name: str) -> float:
    judgement: Judgement = episode.judgements[term]
    amount: Any = getattr(judgement, name)
    return float(amount) / max(1, len(judgement.scores))


def _interval(values: Sequence[float], bounds: Bounds) -> Interval | None:
    """Return the mean over groups with its interval; None without values."""
    return bootstrap_interval(
        [[value] for value in values],
        num_resamples=NUM_RESAMPLES,
        confidence=CONFIDENCE,
        seed=0,
        bounds=bounds,
    )


def _over(num_groups: int) -> str:
    return f"over {num_groups} groups" if num_groups > 1 else "in one group, so without an interval"


def _numbers(name: str, interval: Interval) -> dict[str, float]:
    if interval.low is None or interval.high is None:
        return {name: interval.mean}
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _line(name: str, is_bad: bool, text: str, numbers: dict[str, float]) -> Line:
    return Line(name, Result.FAIL if is_bad else Result.OK, text, numbers)
