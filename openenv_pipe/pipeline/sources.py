"""Where the groups come from that training learns from: the one thing that is asked is "of step n".

`PlayedGroups` plays them when it is asked. Refused here: the learner. What a source has to
remember from step to step it writes into a checkpoint, and reads from there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from openenv_pipe.assembly import Parts
from openenv_pipe.grpo.advantages import has_signal
from openenv_pipe.runs.files import read_json, write_json
from openenv_pipe.tasks import build_order
from openenv_pipe.types import Group

ORDER = "order.json"


class GroupSource(Protocol):
    """Scored groups, step by step."""

    version: int  # of the weights that it was last told of, by `publish` or by `load`

    version: int  # of the weights that it was last told of, by `publish` or by `load`

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
    """The policy plays each step's groups when the step begins: on policy.

    Dynamic sampling (DAPO, arXiv:2503.14476): with `max_sampling_rounds` above 1, groups without a
    signal are followed by as many of further tasks, until enough have one or the rounds are over.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.config
        tasks = parts.config.env.tasks
        self._order = build_order(tasks.order, parts.tasks.train, parts.config.seed)
        self._num_taken: int | None = None  # of the order; None: as many as without rounds
        self.version = 0
        self.version = 0

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
        wanted, discount = trainer.tasks_per_step, trainer.advantage.discount
        if self._num_taken is None:
            self._num_taken = (step - 1) * wanted
        found = await self._play(f"step {step}", wanted)
        for number in range(2, trainer.max_sampling_rounds + 1):
            missing = wanted - sum(has_signal(group, discount=discount) for group in found)
            if missing == 0:
                break
            found += await self._play(f"step {step} round {number}", missing)
        return found

    async def _play(self, label: str, count: int) -> list[Group]:
        """Groups of the order's next tasks."""
        assert self._num_taken is not None
        trainer = self._config.trainer
        groups = await self._parts.collect(
            self._order.take(self._num_taken, count),
            group_size=trainer.group_size,
            temperature=trainer.temperature,
            label=label,
        )
        self._num_taken += count
        self._order.record(groups)
        return groups

    async def publish(self, step: int) -> None:
        self.version = step
        await self._parts.engine.publish(step)

    async def metrics(self) -> Mapping[str, float]:
        return await self._parts.engine.metrics()

    def save(self, folder: Path) -> None:
        state = {
            "version": self.version,
            "num_taken": self._num_taken,
            "order": self._order.state(),
        }
        write_json(folder / ORDER, state)

    def load(self, folder: Path) -> None:
        if (folder / ORDER).exists():
            state = read_json(folder / ORDER)
            self.version = state["version"]
            self.version = state["version"]
            self._num_taken = state["num_taken"]
            self._order.restore(state["order"])

    async def close(self) -> None:
        """Nothing is under way between two steps."""
