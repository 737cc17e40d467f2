"""Several environments in one run: each episode is played and scored by its own environment's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import JsonValue

from openenv_pipe.environments.tasks import Splits
from openenv_pipe.environments.tasks.mixed import NamedTasks
from openenv_pipe.rollout.context import EpisodeSpec, PlayContext, RolloutContext
from openenv_pipe.types import Episode, Group


def mixed(environments: Mapping[str, RolloutContext]) -> RolloutContext:
    """Return what plays the tasks of all environments.

    environments: by the name that their tasks have; the first one's is empty.
    """
    first, *others = environments
    named = {first: environments[first]} | {
        name: replace(environments[name], splits=_named(environments[name].splits, name))
        for name in others
    }
    return replace(
        environments[first],
        loop=MixedRunner(named),
        scorer=MixedScorer(named),
        parts=named,
    )


def _named(splits: Splits, env: str) -> Splits:
    return Splits(train=NamedTasks(splits.train, env), eval=NamedTasks(splits.eval, env))


class MixedRunner:
    """Plays each episode by the loop of its task's environment. It is an `EpisodeRunner`."""

    def __init__(self, parts: Mapping[str, RolloutContext]) -> None:
        self._parts = parts

    @property
    def capacity(self) -> int:
        return sum(part.runner.capacity for part in self._parts.values())

    @property
    def num_deaths(self) -> int:
        return sum(part.runner.num_deaths for part in self._parts.values())

    def facts(self) -> dict[str, JsonValue]:
        """Return the facts of the first environment, and those of the others by their names."""
        first, *others = self._parts
        beside: dict[str, JsonValue] = {name: self._parts[name].runner.facts() for name in others}
        return {**self._parts[first].runner.facts(), "beside": beside}

    async def play(self, context: PlayContext, spec: EpisodeSpec) -> Episode:
        """See `EpisodeRunner.play`."""
        part = self._parts[spec.task.env]
        return await part.runner.play(replace(part, engine=context.engine), spec)


class MixedScorer:
    """Scores each group by its own environment's reward. It is a `Scorer`."""

    def __init__(self, parts: Mapping[str, RolloutContext]) -> None:
        self._scorers = {name: part.scorer for name, part in parts.items()}

    @property
    def reads_messages(self) -> bool:
        return any(scorer.reads_messages for scorer in self._scorers.values())

    async def score(self, group: Group) -> None:
        await self._scorers[group.task.env].score(group)

    def accept(self, groups: Sequence[Group]) -> None:
        for name, scorer in self._scorers.items():
            if own := [group for group in groups if group.task.env == name]:
                scorer.accept(own)
