"""Score the recorded episodes of a run again, and write them beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.commands.recorded_groups import recorded_groups, recorded_steps, without_rewards
from openenv_pipe.config.compose import amend
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.rescore.changes import Changes
from openenv_pipe.rewards.scoring import open_scorer
from openenv_pipe.runs.episodes import episodes_path, write_episodes
from openenv_pipe.runs.find import find_run, split_runs_dir
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.system.tasks import run_all

FOLLOWED = ("reward", "judge")  # the blocks that scoring follows


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescored:
    """What came of it."""

    output: Path  # has episodes/step_*.jsonl.gz, in the format of the run's own
    changes: Changes


async def rescore_run(
    words: Sequence[str],
    output: Path | None,
    *,
    step: int | None,
    trust: bool,
    notify: Callable[[str], None],
) -> Rescored:
    """Score the episodes of a run with its own reward, changed by the overrides.

    The run's folder is read only. Answers that it has of the same judge are used again.

    Args:
        words: the run, and overrides of `reward` and `judge`.
        output: a folder that does not exist yet; None: RUN_rescored, beside the run's folder.
        step: only this one; None: all.
        notify: receives progress messages.

    Raises:
        RunFolderError: the run does not exist, has no episodes, or is not trusted.
        ConfigError: an override is wrong, or `output` exists.
        JudgeError: a judge or a verifier failed too often, or the budget is spent.
    """
    runs = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if len(runs) != 1:
        raise ConfigError(f"got {len(runs)} runs; name the one whose episodes are scored again")
    runs_dir, changes = split_runs_dir(overrides)
    _reject_others(changes)
    folder = find_run(runs[0], runs_dir)
    config = amend(folder.config_to_run(trust=trust), changes)
    output = _new_folder(folder, output)
    steps = recorded_steps(folder) if step is None else [step]
    _make(output / "episodes")
    found = Changes()
    verdicts = output / "verdicts"
    log = output / "judge.log"
    async with open_scorer(config, verdicts, folder.verdicts, log=log) as scorer:
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


def _reject_others(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an override that scoring does not follow."""
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key.partition(".")[0].partition("/")[0] not in FOLLOWED:
            raise ConfigError(
                f"{key} has no effect on recorded episodes; change keys of reward and judge only, "
                "as in: reward=usable"
            )


def _new_folder(folder: RunFolder, output: Path | None) -> Path:
    """Return the results' folder. Raises ConfigError if it exists or is in the run's own."""
    output = output or folder.path.with_name(f"{folder.path.name}_rescored")
    if output.resolve().is_relative_to(folder.path.resolve()):
        raise ConfigError(f"--output {output} is in the run's folder, which stays as it is")
    if output.exists():
        raise ConfigError(f"{output} exists; name another folder by --output, or remove it")
    return output


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error}; name another by --output") from error
