"""Recorded training episodes, as they were before they had a reward, to be scored again."""

import re
from dataclasses import replace

from openenv_pipe.errors import RunFolderError
from openenv_pipe.rollout.collector import group_seed
from openenv_pipe.rollout.context import PLAYER
from openenv_pipe.runs.episodes import all_episodes_paths, episodes_path, read_episodes
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.types import Episode, Group

STEP_FILE = re.compile(r"step_(\d{6,})\.jsonl\.gz")


def recorded_steps(folder: RunFolder) -> list[int]:
    """Return the GRPO steps whose episodes are recorded. Raises RunFolderError if none are."""
    names = [path.name for path in all_episodes_paths(folder.path)]
    steps = [int(found[1]) for name in names if (found := STEP_FILE.fullmatch(name))]
    if not any(steps):
        raise RunFolderError(
            f"{folder.path} has no recorded episodes of training; name a run that has done a step "
            "of GRPO"
        )
    return sorted(step for step in steps if step)  # step 0 has the demonstrations


def recorded_groups(folder: RunFolder, step: int) -> list[Group]:
    """Read the groups of a step, with the seeds that they were played with.

    Raises RunFolderError, also for a run of several environments.
    """
    if beside := folder.written_config.beside:
        raise RunFolderError(
            f"{folder.path} has several environments, each with a reward of its own (beside: "
            f"{', '.join(beside)}); only runs of one environment can be scored again"
        )
    path = episodes_path(folder.path, step)
    if not path.exists():
        first, *_, last = [*recorded_steps(folder)] * 2
        raise RunFolderError(
            f"{path} does not exist; the run has episodes of steps {first} to {last}"
        )
    groups, seed = read_episodes(path), folder.written_config.seed
    for group in groups:
        of_game = group.id.removesuffix(f"/{group.task.labels.get(PLAYER)}")  # of all its players
        label, _, place = of_game.rpartition("/")
        if place.isdecimal():
            group.seed = group_seed(seed, label, int(place))
    return groups


def without_rewards(group: Group) -> Group:
    """Return a copy of the group with its episodes as they were played, before they were scored."""
    return replace(group, episodes=[_unscored(episode) for episode in group.episodes])


def _unscored(episode: Episode) -> Episode:
    return replace(
        episode,
        reward=0.0,
        whole_reward=0.0,
        turn_rewards=[],
        reward_terms={},
        success=False,
        judgements={},
        unscored=None,
    )
