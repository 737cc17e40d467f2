"""Training from recorded episodes: the learner alone, with no environment and no engine."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from openenv_pipe.errors import RunFolderError
from openenv_pipe.models.teacher import give_teachers
from openenv_pipe.pipeline.build import learner_alone
from openenv_pipe.pipeline.facts import policy_facts
from openenv_pipe.pipeline.group_sources import GroupSource
from openenv_pipe.pipeline.metrics_log import finish_despite_cancel
from openenv_pipe.pipeline.run import Attempt, RunControl, run
from openenv_pipe.pipeline.stage import Evaluator
from openenv_pipe.pipeline.stages import StageRunner
from openenv_pipe.runs.checkpoints import StageStep
from openenv_pipe.runs.differences import find_other_facts
from openenv_pipe.runs.episodes import episodes_path, read_episodes
from openenv_pipe.system.progress import EpisodeCount
from openenv_pipe.types import Group


class RecordedGroups(GroupSource):
    """Provides the groups that another run has learned from, and samples none."""

    def __init__(self, folder: Path) -> None:
        self.version = 0
        self._folder = folder

    async def demonstrations(
        self, notify: Callable[[str], None], count: EpisodeCount
    ) -> list[Group]:
        return await self._read(0)

    async def groups(self, step: int, count: EpisodeCount | None = None) -> list[Group]:
        return await self._read(step)

    async def publish(self, version: int) -> None:
        self.version = version

    def load(self, folder: Path) -> None:
        self.version = StageStep.of(folder.parent).step

    async def _read(self, step: int) -> list[Group]:
        path = episodes_path(self._folder, step)
        if not path.exists():
            raise RunFolderError(
                f"{path} is not there: the run has no episodes of this step to train on; "
                "--steps N (from Python: steps=N) ends before it"
            )
        return await asyncio.to_thread(read_episodes, path)


def replay(attempt: Attempt, control: RunControl, recorded: Path) -> None:
    """Train as `attempt` says, on the episodes of another folder."""
    run(attempt, control, partial(_learn_again, recorded))


async def _learn_again(recorded: Path, attempt: Attempt, control: RunControl) -> str | None:
    async with learner_alone(attempt.config, attempt.folder.logs) as components:
        await components.compute(give_teachers, components.policy, attempt.config)
        facts = await components.compute(policy_facts, components.policy)
        if attempt.on_differences:
            attempt.on_differences(find_other_facts(attempt.expected, facts))
        attempt.folder.update(**facts)
        runner = StageRunner(
            components,
            RecordedGroups(recorded),
            attempt.folder,
            control.progress,
            evaluator=Evaluator(),
            stop_after=attempt.stop_after,
            trackers=attempt.trackers,
        )
        try:
            return await runner.run(attempt.checkpoint)
        finally:
            await finish_despite_cancel(runner.close(saves=not control.stop.is_repeated))
