"""The replay: the best earlier episode of each task, on which the policy is trained again.

Checkpoints contain these episodes, so that a resumed run replays the same ones.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from openenv_pipe.algorithms.advantages import ZERO_SPREAD, GroupAdvantages
from openenv_pipe.algorithms.samples import episode_samples
from openenv_pipe.config.schema import ReplayConfig
from openenv_pipe.rollout.context import PLAYER
from openenv_pipe.runs.episodes import read_recorded_episodes, write_episodes
from openenv_pipe.types import Episode, Group, Sample

REPLAY = "replay.jsonl.gz"


class Replay:
    """Keeps good episodes, and draws those that a step replays. Without `config`, it keeps none."""

    def __init__(self, config: ReplayConfig | None, seed: int) -> None:
        self._config = config
        self._seed = seed
        # One per environment, task and player, as a group with a single episode. The one that has
        # been kept for longest comes first.
        self._kept: dict[tuple[str, str, str], Group] = {}

    def samples(self, step: int) -> list[Sample]:
        """Draw the episodes that a step replays, and return their samples."""
        if self._config is None:
            return []
        number = min(self._config.per_step, len(self._kept))
        drawn = random.Random(f"{self._seed}/replay/{step}").sample([*self._kept.values()], number)
        return [
            sample
            for group in drawn
            for episode in group.episodes
            for sample in episode_samples(group.id, episode, [0.0] * len(episode.turns))
        ]

    def add(self, step: Sequence[GroupAdvantages]) -> None:
        """Keep the best trained episode of each group, if it is good and its task has no better."""
        for each in step:
            if self._config is not None and each.trained:
                best = max(each.trained, key=lambda episode: episode.reward)
                mean = fmean(episode.reward for episode in each.compared)
                if self._config.min_reward is not None or best.reward > mean + ZERO_SPREAD:
                    self._keep(each.group.id, best)

    def _keep(self, group: str, episode: Episode) -> None:
        assert self._config is not None
        least, task = self._config.min_reward, episode.task
        key = (task.env, task.id, task.labels.get(PLAYER, ""))
        if least is not None and episode.reward < least:
            return
        if key in self._kept and self._kept[key].episodes[0].reward >= episode.reward:
            return
        self._kept.pop(key, None)
        self._kept[key] = Group(id=group, task=episode.task, episodes=[_ids_alone(episode)])
        if len(self._kept) > self._config.size:
            del self._kept[self._least()]

    def _least(self) -> tuple[str, str, str]:
        """Return the key of the worst episode of the environment that has the most."""
        # Rewards of different environments cannot be compared.
        counts = Counter(env for env, *_ in self._kept)
        return min(
            self._kept, key=lambda key: (-counts[key[0]], self._kept[key].episodes[0].reward)
        )

    def save(self, folder: Path) -> None:
        """Write the episodes into a checkpoint's folder."""
        if self._kept:
            write_episodes(folder / REPLAY, [*self._kept.values()], folder=folder)

    def load(self, folder: Path) -> None:
        """Load what `save` wrote; without the file, as in some forks, nothing is kept."""
        if self._config is not None and (folder / REPLAY).exists():
            for each in read_recorded_episodes(folder / REPLAY, folder=folder):
                self._keep(each.group, each.episode)


def _ids_alone(episode: Episode) -> Episode:
    """Return an episode without what the environment returned, which no sample needs."""
    turns = [replace(turn, steps=[]) for turn in episode.turns]
    return replace(episode, turns=turns, first_observation={})
