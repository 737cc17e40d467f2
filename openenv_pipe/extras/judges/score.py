"""`judge score`: score the recorded episodes of a step with another judge or reward."""

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean

from openenv_pipe.algorithms.agreement import agreement_of, rank_correlation
from openenv_pipe.errors import JudgeError
from openenv_pipe.extras.judges.subject import Recorded, judged_terms, score_again
from openenv_pipe.runs.episodes import episodes_path, write_episodes
from openenv_pipe.types import Group

Row = tuple[str, float | None, float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescored:
    """What came of scoring a step again."""

    path: Path  # the episodes with their new rewards, in the format of the run's own
    rows: list[Row]  # a name, its value in the run, and its value now


async def score_step(recorded: Recorded, step: int) -> Rescored:
    """Score the recorded episodes of a step again, and write them beside the run.

    Raises:
        RunFolderError: the run has no episodes of that step, or they are damaged.
        JudgeError: the judge failed for all episodes, or its budget is spent.
        ConfigError: the endpoint rejects every request, or no reward term asks a judge.
    """
    before = recorded.groups(step)
    config = recorded.config
    after = await score_again(recorded, before, judge=config.judge, reward=config.reward)
    played = [each for group in after for each in group.episodes if not each.failed]
    if played and not any(each.is_scored for each in played):
        raise JudgeError(
            f"the judge gave no verdict for any of {len(played)} episodes; the last reason: "
            f"{played[-1].unscored}"
        )
    path = _new_path(recorded.output / episodes_path(recorded.folder.path, step).name)
    write_episodes(path, after)
    return Rescored(path=path, rows=_compare(before, after))


def _new_path(path: Path) -> Path:
    """Return the path, or one with a number if it is taken."""
    stem, suffixes = path.name.split(".", 1)
    names = (path.name if n == 1 else f"{stem}_{n}.{suffixes}" for n in count(1))
    return next(found for name in names if not (found := path.with_name(name)).exists())


def _compare(before: list[Group], after: list[Group]) -> list[Row]:
    rows: list[Row] = [("mean reward", _mean_reward(before), _mean_reward(after))]
    rows.append(("rank correlation with the rewards in the run", None, _same_ranks(before, after)))
    for term in dict.fromkeys([*judged_terms(before), *judged_terms(after)]):
        old, new = agreement_of(before, term), agreement_of(after, term)
        rows += [
            (f"{term}: {name}", _mean(old.get(name)), _mean(new.get(name)))
            for name in dict.fromkeys([*old, *new])
        ]
    for name in ("num_calls", "num_tokens", "cost"):
        rows.append((f"judge: {name}", _spent(before, name), _spent(after, name)))
    rows.append(("episodes without a reward", _unscored(before), _unscored(after)))
    return rows


def _mean_reward(groups: list[Group]) -> float | None:
    return _mean([episode.reward for group in groups for episode in group.scored])


def _same_ranks(before: list[Group], after: list[Group]) -> float | None:
    """Return the mean over groups of the rank correlation of the rewards before and after."""
    found = []
    for old, new in zip(before, after, strict=True):
        pairs = [
            (a.reward, b.reward)
            for a, b in zip(old.episodes, new.episodes, strict=True)
            if a.is_scored and b.is_scored
        ]
        if pairs:
            truth, values = zip(*pairs, strict=True)
            found.append(rank_correlation(values, truth))
    return _mean([each for each in found if each is not None])


def _mean(values: list[float] | None) -> float | None:
    return fmean(values) if values else None


def _spent(groups: list[Group], name: str) -> float:
    judgements = [j for group in groups for e in group.episodes for j in e.judgements.values()]
    return float(sum(getattr(each, name) for each in judgements))


def _unscored(groups: list[Group]) -> float:
    return float(sum(e.unscored is not None for group in groups for e in group.episodes))
