"""A league: earlier versions of the policy, which play against it in a share of training's games.

Each member is a copy of the trained weights. Checkpoints contain the league, so that a resumed run
goes on against the same opponents.
"""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from openenv_pipe.config.schema import POLICY, UNTRAINED, LeagueConfig, RunConfig
from openenv_pipe.engines.base import Engine
from openenv_pipe.engines.local import FrozenPolicy, LocalEngine
from openenv_pipe.models.policy import Policy
from openenv_pipe.rollout import RolloutContext
from openenv_pipe.rollout.context import OPPONENT
from openenv_pipe.runs.checkpoints import StageStep
from openenv_pipe.system.files import naming
from openenv_pipe.system.tasks import in_thread
from openenv_pipe.types import Task

LEAGUE = "league.safetensors"
Game = tuple[Task, Mapping[str, Engine | str]]  # the task, and its roles as in `RolloutContext`


@dataclass
class League:
    """The members of an environment's league, and which games they play."""

    config: LeagueConfig
    env: str  # the environment's name in its tasks
    seed: int
    policy: Policy
    engine: LocalEngine
    executor: Executor  # torch's thread
    _members: dict[int, Policy] = field(
        default_factory=dict, init=False
    )  # by version, oldest first

    async def join(self, version: int) -> None:
        """Let the current weights join, if they are at least `every` steps after the last member.

        Call it while nothing is played.
        """
        if version >= max(self._members, default=0) + self.config.every:
            self._add(version, await in_thread(self.executor, self.policy.twin))

    def _add(self, version: int, member: Policy) -> None:
        """Add a member, in place of the oldest if there are enough of them."""
        self._members[version] = self.engine.frozen[self._name(version)] = member
        if len(self._members) > self.config.size:
            self._drop(min(self._members))

    def drop_after(self, version: int) -> None:
        """Drop the members later than `version`. Call it while nothing is played."""
        for each in [each for each in self._members if each > version]:
            self._drop(each)

    def _drop(self, version: int) -> None:
        del self._members[version], self.engine.frozen[self._name(version)]

    def _name(self, version: int) -> str:
        return f"{self.env} league {version}"

    def cast(self, step: int, games: Sequence[Game], label: str) -> list[Game]:
        """Return the games of a step, some of them with a member as the opponent.

        A member, drawn for the step, plays all of the model's players but the trained one, which
        changes from game to game. Tasks of such games get the member's step as label `opponent`.

        label: of the round of sampling. If the share of its games is no whole number, it is rounded
            up or down at random, by a draw from the label, so that the share holds on average.
        """
        if not self._members:
            return list(games)
        version = sorted(self._members)[self._drawn(step) % len(self._members)]
        member = FrozenPolicy(self.engine, self._name(version))
        num_own = sum(task.env == self.env for task, _ in games)
        num_cast = int(num_own * self.config.share + (self._drawn(label) % 2**32 + 0.5) / 2**32)
        found: list[Game] = []
        num_seen = 0  # of this environment's
        for task, roles in games:
            number = num_seen * num_cast // max(1, num_own)  # games with a member before this one
            num_seen += task.env == self.env
            if number == num_seen * num_cast // max(1, num_own):
                found.append((task, roles))
                continue
            trained = [player for player, role in roles.items() if role == POLICY]
            own = trained[(step + number) % len(trained)]
            labels = {**task.labels, OPPONENT: StageStep("grpo", version).name}
            cast = {
                player: member if role in (POLICY, UNTRAINED) and player != own else role
                for player, role in roles.items()
            }
            found.append((replace(task, labels=labels), cast))
        return found

    def _drawn(self, what: int | str) -> int:
        digest = hashlib.sha256(f"{self.seed}/league/{self.env}/{what}".encode()).digest()
        return int.from_bytes(digest[:8], "big")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the trained weights of all members, by names that `restore` reads."""
        return {
            f"{self.env}/{version}/{number}": values.data
            for version, member in self._members.items()
            for number, (_, values) in enumerate(member.trained_parameters())
        }

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add the members from what `tensors` returned, also of other environments' leagues.

        Call it in torch's thread.
        """
        names = (name.split("/") for name in tensors)
        for version in sorted({int(version) for env, version, _ in names if env == self.env}):
            member = self.policy.twin()
            for number, (_, values) in enumerate(member.trained_parameters()):
                values.copy_(tensors[f"{self.env}/{version}/{number}"])
            self._add(version, member)


def build_leagues(
    config: RunConfig, rollout: RolloutContext, policy: Policy | None, executor: Executor
) -> list[League]:
    """Build the league of each environment that has one. executor: torch's thread."""
    leagues = []
    for name, each in config.environments.items():
        if each.env.league is not None:
            assert policy is not None and isinstance(rollout.engine, LocalEngine)
            league = League(each.env.league, name, config.seed, policy, rollout.engine, executor)
            leagues.append(league)
    return leagues


def save_leagues(leagues: Sequence[League], folder: Path) -> None:
    """Write the members of all leagues into a checkpoint's folder."""
    tensors = {name: values for each in leagues for name, values in each.tensors().items()}
    if tensors:
        with naming(folder / LEAGUE):
            save_file(tensors, folder / LEAGUE)


def load_leagues(leagues: Sequence[League], folder: Path) -> None:
    """Load what `save_leagues` wrote; without the file, as in some forks, leagues stay empty."""
    if (folder / LEAGUE).exists():
        tensors = load_file(folder / LEAGUE)
        for each in leagues:
            each.restore(tensors)
