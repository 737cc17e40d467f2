"""Recorded episodes, and the judge and the reward that score them again."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.commands.recorded_groups import (
    recorded_groups,
    recorded_steps,
    without_rewards,
)
from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import JudgeConfig, RewardConfig, RunConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.registry import block_types, load
from openenv_pipe.rewards import Scorer
from openenv_pipe.runs.find import find_run, split_runs_dir
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.places import default_folder
from openenv_pipe.system.tasks import run_all
from openenv_pipe.types import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A run with recorded episodes, and the configuration of the judge that will read them."""

    folder: RunFolder
    config: RunConfig  # its `judge` and `reward` score the episodes
    output: Path  # the folder of what the judge answers; nothing is written into the run's own

    @property
    def steps(self) -> list[int]:
        """The steps of GRPO whose episodes are recorded. Raises RunFolderError without any."""
        return recorded_steps(self.folder)

    def groups(self, step: int) -> list[Group]:
        """Read the groups of a step, with the seeds that they were played with.

        Raises RunFolderError.
        """
        return recorded_groups(self.folder, step)


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
    recorded: Recorded,
    groups: Sequence[Group],
    *,
    judge: JudgeConfig,
    reward: RewardConfig,
    repeat: int = 0,
) -> list[Group]:
    """Return copies of the groups with the rewards that the judge gives now.

    Answers that the run has of the same judge to the same question are used again.

    repeat: 0; or a number, to ask the same once more. Raises JudgeError and ConfigError.
    """
    scored = [without_rewards(group) for group in groups]
    folders = (recorded.output / "verdicts", recorded.folder.verdicts)
    log = recorded.output / "judge.log"
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


def judged_terms(groups: Sequence[Group]) -> list[str]:
    """Return the reward terms that a judge decided, in their order."""
    names = [name for group in groups for each in group.episodes for name in each.judgements]
    return list(dict.fromkeys(names))
