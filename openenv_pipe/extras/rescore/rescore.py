"""Score the recorded episodes of a run again, write them beside it, and say what changes."""

import math
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import StatisticsError, correlation, fmean
from typing import SupportsIndex

from openenv_pipe.commands.recorded_groups import recorded_groups, recorded_steps, without_rewards
from openenv_pipe.errors import ConfigError, RunFolderError
from openenv_pipe.rewards.scoring import open_scorer
from openenv_pipe.runs.episodes import episodes_path, read_recorded_episodes, write_episodes
from openenv_pipe.runs.find import find_run, split_runs_dir
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.notebook import Episodes
from openenv_pipe.system.tasks import run_all
from openenv_pipe.system.user_numbers import shown, whole_number
from openenv_pipe.types import Group

SAME = 1e-9  # Rewards are sums of floats; smaller differences do not count.
Row = tuple[str, float | None, float | None]
FOLLOWED = ("reward", "judge")  # the blocks that are used, and can be changed
OTHER = 'name another folder by --output (from Python: output="DIR")'
KEPT = {"verdicts", "judge.log"}  # what is left of an attempt that failed: it may have cost money


@dataclass(kw_only=True, slots=True)
class Changes:
    """Values in the run and after scoring again, of episodes that are added group by group."""

    before: dict[str, list[float]] = field(default_factory=dict)  # by "reward", "success", term
    now: dict[str, list[float]] = field(default_factory=dict)
    rewards: list[tuple[float, float]] = field(default_factory=list)  # of episodes that have both
    num_groups: int = 0
    num_signals: tuple[int, int] = (0, 0)  # groups in which rewards differ, in the run and now
    num_reordered: int = 0

    def add(self, before: Group, now: Group) -> None:
        """Add a group as the run has it, and as it is scored now; both with the same members."""
        for values, group in ((self.before, before), (self.now, now)):
            for episode in group.scored:
                numbers = {"reward": episode.reward, "success": float(episode.success)}
                for name, number in {**episode.reward_terms, **numbers}.items():
                    values.setdefault(name, []).append(number)
        pairs = [
            (old.reward, new.reward)
            for old, new in zip(before.episodes, now.episodes, strict=True)
            if old.is_scored and new.is_scored
        ]
        self.rewards += pairs
        self.num_groups += 1
        old, new = (_spreads([each.reward for each in group.scored]) for group in (before, now))
        self.num_signals = (self.num_signals[0] + old, self.num_signals[1] + new)
        self.num_reordered += _is_reordered(pairs)

    @property
    def means(self) -> list[Row]:
        names = dict.fromkeys(["reward", "success", *self.before, *self.now])
        return [(name, _mean(self.before.get(name)), _mean(self.now.get(name))) for name in names]

    @property
    def agreement(self) -> dict[str, float | None]:
        """How far the rewards agree; the correlation is None if one of them is constant."""
        same = [abs(old - new) <= SAME for old, new in self.rewards]
        return {
            "episodes": len(self.now.get("reward", ())),
            "equal_share": _mean(same),
            "correlation": _correlation(self.rewards),
            "groups": self.num_groups,
            "groups_with_signal_before": self.num_signals[0],
            "groups_with_signal_now": self.num_signals[1],
            "groups_reordered": self.num_reordered,
        }


def _mean(values: Sequence[float] | None) -> float | None:
    return fmean(values) if values else None


def _correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    try:
        return correlation([old for old, _ in pairs], [new for _, new in pairs])
    except StatisticsError:  # one of them is constant, or there are fewer than two pairs
        return None


def _spreads(rewards: Sequence[float]) -> bool:
    return bool(rewards) and max(rewards) - min(rewards) > SAME


def _is_reordered(pairs: Sequence[tuple[float, float]]) -> bool:
    """Return whether the order of any two episodes has changed; being equal is an order, too."""
    return any(
        _sign(one_old - other_old) != _sign(one_new - other_new)
        for (one_old, one_new), (other_old, other_new) in combinations(pairs, 2)
    )


def _sign(difference: float) -> int:
    return 0 if abs(difference) <= SAME else int(math.copysign(1, difference))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescored:
    output: Path  # has episodes/step_*.jsonl.gz, in the format of the run's own
    changes: Changes

    def episodes(self, step: SupportsIndex) -> Episodes:
        """The groups of a step with their new rewards, as `Run.episodes`.

        Raises RunFolderError if they were not scored again.
        """
        number = whole_number(step)
        if number is None:
            raise RunFolderError(f"{shown(step)} is no step; expected a whole number")
        return Episodes(read_recorded_episodes(episodes_path(self.output, number)), number)

    def __repr__(self) -> str:
        rows = (
            f"{name}: {_shown(before)} in the run, {_shown(now)} now"
            for name, before, now in self.changes.means
        )
        return "\n".join([*rows, str(self.output)])


async def rescore_run(
    words: Sequence[str],
    output: Path | None,
    *,
    step: int | None,
    trust: bool,
    notify: Callable[[str], None],
) -> Rescored:
    """Score the episodes of a run with its own reward, changed by the overrides.

    The run's folder is only read. Its answers of the same judge are reused.

    words: the run, and overrides of `reward` and `judge`.
    output: a folder that does not exist yet, or has the answers of an attempt that failed;
        None: RUN_rescored, beside the run's folder.
    step: only this one; None: all.
    Raises RunFolderError, ConfigError and JudgeError.
    """
    runs = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if len(runs) != 1:
        raise ConfigError(f"got {len(runs)} runs; name the one whose episodes are scored again")
    runs_dir, changes = split_runs_dir(overrides)
    _reject_others(changes)
    folder = find_run(runs[0], runs_dir)
    config = folder.config_to_run(changes, trust=trust, secrets_of=FOLLOWED)
    output = _new_folder(folder, output)
    steps = recorded_steps(folder) if step is None else [step]
    _make(output / "episodes")
    found = Changes()
    async with (
        _removed_on_failure(output),
        open_scorer(
            config, output / "verdicts", folder.verdicts, log=output / "judge.log"
        ) as scorer,
    ):
        for number in steps:
            before = recorded_groups(folder, number)
            now = [without_rewards(group) for group in before]
            await run_all(scorer.score(group) for group in now)
            scorer.accept(now)
            write_episodes(output / "episodes" / episodes_path(output, number).name, now)
            for old, new in zip(before, now, strict=True):
                found.add(old, new)
            notify(f"step {number}: {sum(len(group.episodes) for group in now)} episodes")
    return Rescored(output=output, changes=found)


def _shown(mean: float | None) -> str:
    return "–" if mean is None else f"{mean:.4g}"


def _reject_others(overrides: Sequence[str]) -> None:
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key.partition(".")[0].partition("/")[0] not in FOLLOWED:
            raise ConfigError(
                f"{key} cannot be changed for recorded episodes; change keys of reward and judge "
                "only, as in: reward=usable"
            )


def _new_folder(folder: RunFolder, output: Path | None) -> Path:
    """Return the results' folder. Raises ConfigError if it is not new, or is in a run's folder."""
    output = output or folder.path.with_name(f"{folder.path.name}_rescored")
    if any((above / "run.json").exists() for above in (output, *output.resolve().parents)):
        raise ConfigError(f"{output} is in the folder of a run, which stays as it is; {OTHER}")
    is_left = output.is_dir() and KEPT.issuperset(path.name for path in output.iterdir())
    if output.exists() and not is_left:
        raise ConfigError(f"{output} exists; {OTHER}, or remove it")
    return output


@asynccontextmanager
async def _removed_on_failure(output: Path) -> AsyncIterator[None]:
    """Remove what an attempt has written if it fails, except for what a judge has answered."""
    try:
        yield
    except BaseException:
        for name in ("episodes", "images"):
            shutil.rmtree(output / name, ignore_errors=True)
        with suppress(OSError):  # It has answers.
            output.rmdir()
        raise


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error}; {OTHER}") from error
