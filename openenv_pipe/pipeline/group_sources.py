"""Where the groups come from that training learns from: the one thing that is asked is "of step n".

`PlayedGroups` plays them, when it is asked or ahead of that. Refused here: the learner. What a
source has to remember from step to step it writes into a checkpoint, and reads from there.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from openenv_pipe.algorithms.advantages import has_signal
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.environments.tasks import build_order
from openenv_pipe.pipeline.components import with_scripted_player
from openenv_pipe.rollout import RolloutContext, collect_groups
from openenv_pipe.runs.episodes import read_episodes, write_episodes
from openenv_pipe.system.files import read_json, write_json
from openenv_pipe.types import Group

ORDER, AHEAD = "order.json", "ahead.jsonl.gz"


class GroupSource(Protocol):
    """Scored groups, step by step."""

    version: int  # of the weights that it was last told of, by `publish` or by `load`

    async def demonstrations(self) -> list[Group]:
        """What the warm start imitates."""
        ...

    async def groups(self, step: int) -> list[Group]:
        """What GRPO's step learns from. Steps are asked for in order, each once."""
        ...

    async def begin_update(self) -> None:
        """The learner works now, and tells by `publish` when it has done so."""
        ...

    async def publish(self, step: int) -> None:
        """The policy has new weights, those after `step`: groups from now on are to be theirs."""
        ...

    async def metrics(self) -> Mapping[str, float]:
        """What sampling and publishing measured since the last call."""
        ...

    async def settle(self) -> None:
        """Wait until all that older weights began is over, and sampling is by the current ones.

        Before a checkpoint, which has one set of weights to go on from.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write into a checkpoint what `groups` of the next step depends on. After `settle`."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from there; what a fork has left out begins anew."""
        ...

    async def close(self) -> None:
        """End what is still going on."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Collection:
    """The groups of a step, under way or over."""

    version: int  # of the weights when it began
    order: Mapping[str, Any]  # the state of the task order before it
    playing: asyncio.Task[list[Group]]


class PlayedGroups:
    """The policy plays each step's groups: on policy, or ahead of the learner.

    With `max_staleness` 0 they are played when the step begins. With s above 0, the groups of the
    s next steps are played while the learner works on this one. A step's groups begin only when
    the weights are at most s versions behind those that will learn from them, and steps take
    their groups in the order of the tasks: to take what is over first would be a preference for
    short episodes. So nothing is ever too old.

    Dynamic sampling (DAPO, arXiv:2503.14476): with `max_sampling_rounds` above 1, groups without a
    signal are followed by as many of further tasks, until enough have one or the rounds are over.
    """

    def __init__(self, config: RunConfig, rollout: RolloutContext) -> None:
        self._config = config
        self._rollout = rollout
        self._order = build_order(config.env.tasks.order, rollout.splits.train, config.seed)
        self._num_taken: int | None = None  # of the order; None: as many as without rounds
        self._collections: dict[int, _Collection] = {}  # by step
        self._restored: dict[int, list[Group]] = {}  # by step: those of a checkpoint
        self._restored_order: dict[str, Any] = {}  # before them
        self._is_published = True
        self.version = 0

    async def demonstrations(self) -> list[Group]:
        warm_start = self._config.trainer.warm_start
        assert warm_start.policy is not None
        return await collect_groups(
            with_scripted_player(self._rollout, warm_start.policy),
            self._order.take(0, warm_start.num_episodes),
            group_size=1,
            temperature=1.0,
            seed=self._config.seed,
            label="warm start",
        )

    async def groups(self, step: int) -> list[Group]:
        groups = self._restored.pop(step, None)
        if groups is None:
            self._begin(step)
            groups = await asyncio.shield(self._collections[step].playing)
            del self._collections[step]
        await self._publish_late()
        trainer = self._config.trainer
        last = min(step + trainer.max_staleness, trainer.steps)
        for ahead in range(step + 1, last + 1):
            self._begin(ahead)
        return groups

    def _begin(self, step: int) -> None:
        if step not in self._collections and step not in self._restored:
            self._collections[step] = _Collection(
                version=self.version,
                order=self._order_state(),
                playing=asyncio.create_task(self._collect(step)),
            )

    async def _collect(self, step: int) -> list[Group]:
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
        tasks = self._order.take(self._num_taken, count)
        self._num_taken += count
        groups = await collect_groups(
            self._rollout,
            tasks,
            group_size=trainer.group_size,
            temperature=trainer.temperature,
            seed=self._config.seed,
            label=label,
        )
        self._order.record(groups)
        return groups

    async def begin_update(self) -> None:
        await self._rollout.engine.begin_update(idle=not self._collections)  # else: played ahead

    async def publish(self, step: int) -> None:
        self.version = step
        is_playing = any(not each.playing.done() for each in self._collections.values())
        in_flight = self._rollout.engine.capabilities.publishes_in_flight
        self._is_published = in_flight or not is_playing
        if self._is_published:
            await self._rollout.engine.publish(step)

    async def _publish_late(self) -> None:
        """For an engine whose policy must not change while episodes are played."""
        if not self._is_published:
            await self._rollout.engine.publish(self.version)
            self._is_published = True

    async def settle(self) -> None:
        await self._finish([each for each in self._collections.values() if self._is_older(each)])

    async def clear_engine(self) -> None:
        """Waits until others may play on the engine, with the current weights: an evaluation."""
        in_flight = self._rollout.engine.capabilities.publishes_in_flight
        await self._finish([] if in_flight else list(self._collections.values()))

    async def _finish(self, collections: Sequence[_Collection]) -> None:
        if collections:
            await asyncio.wait([each.playing for each in collections])
        await self._publish_late()

    def _is_older(self, collection: _Collection) -> bool:
        """What the current weights began can be played again by them, and will be the same."""
        return collection.version < self.version

    async def metrics(self) -> Mapping[str, float]:
        return await self._rollout.engine.metrics()

    def save(self, folder: Path) -> None:
        kept, orders = dict(self._restored), [self._restored_order] if self._restored else []
        for step, collection in sorted(self._collections.items()):
            orders.append(collection.order)
            if not self._is_older(collection) or collection.playing.exception():
                break
            kept[step] = collection.playing.result()
        else:
            orders.append(self._order_state())
        state = {
            "version": self.version,
            "ahead": {str(step): [group.id for group in groups] for step, groups in kept.items()},
            "order_before": orders[0],  # what was played ahead
            "order_after": orders[-1],
        }
        write_json(folder / ORDER, state)
        if kept:
            groups = [group for step in sorted(kept) for group in kept[step]]
            write_episodes(folder / AHEAD, groups)

    def _order_state(self) -> dict[str, Any]:
        return {"num_taken": self._num_taken, "order": self._order.state()}

    def load(self, folder: Path) -> None:
        if not (folder / ORDER).exists():
            return
        state = read_json(folder / ORDER)
        self.version = state["version"]
        is_ahead_there = (folder / AHEAD).exists()
        order = state["order_after" if is_ahead_there else "order_before"]
        self._num_taken = order["num_taken"]
        self._order.restore(order["order"])
        if is_ahead_there:
            groups = {group.id: group for group in read_episodes(folder / AHEAD)}
            self._restored_order = state["order_before"]
            self._restored = {
                int(step): [groups[name] for name in names]
                for step, names in state["ahead"].items()
            }

    async def close(self) -> None:
        playing = [collection.playing for collection in self._collections.values()]
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
