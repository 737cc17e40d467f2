"""Where the groups come from that training learns from: the one thing that is asked is "of step n".

`PlayedGroups` plays them when it is asked. Refused here: the learner. What a source has to
remember from step to step it writes into a checkpoint, and reads from there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from openenv_pipe.assembly import Parts
from openenv_pipe.runs.files import read_json, write_json
from openenv_pipe.tasks import build_order
from openenv_pipe.types import Group

ORDER = "order.json"


class GroupSource(Protocol):
    """Scored groups, step by step."""

    async def demonstrations(self) -> list[Group]:
        """What the warm start imitates."""
        ...

    async def groups(self, step: int) -> list[Group]:
        """What GRPO's step learns from. Steps are asked for in order, each once."""
        ...

    async def publish(self, step: int) -> None:
        """The policy has new weights, those after `step`: groups from now on are to be theirs."""
        ...

    async def metrics(self) -> Mapping[str, float]:
        """What sampling and publishing measured since the last call."""
        ...

    def save(self, folder: Path) -> None:
        """Write into a checkpoint what `groups` of the next step depends on."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from there; what a fork has left out begins anew."""
        ...

    async def close(self) -> None:
        """End what is still going on."""
        ...


class PlayedGroups:
    """The policy plays each step's groups when the step begins: on policy."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.config
        tasks = parts.config.env.tasks
        self._order = build_order(tasks.order, parts.tasks.train, parts.config.seed)

    async def demonstrations(self) -> list[Group]:
        warm_start = self._config.trainer.warm_start
        assert warm_start.policy is not None
        return await self._parts.collect(
            self._order.take(0, warm_start.num_episodes),
            group_size=1,
            temperature=1.0,
            label="warm start",
            engine=self._parts.scripted_engine(warm_start.policy),
        )

    async def groups(self, step: int) -> list[Group]:
        trainer = self._config.trainer
        groups = await self._parts.collect(
            self._order.take((step - 1) * trainer.tasks_per_step, trainer.tasks_per_step),
            group_size=trainer.group_size,
            temperature=trainer.temperature,
            label=f"step {step}",
        )
        self._order.record(groups)
        return groups

    async def publish(self, step: int) -> None:
        await self._parts.engine.publish(step)

    async def metrics(self) -> Mapping[str, float]:
        return await self._parts.engine.metrics()

    def save(self, folder: Path) -> None:
        write_json(folder / ORDER, self._order.state())

    def load(self, folder: Path) -> None:
        if (folder / ORDER).exists():
            self._order.restore(read_json(folder / ORDER))

    async def close(self) -> None:
        """Nothing is under way between two steps."""
