"""Group sources: the scored groups that each step trains on, sampled with published weights."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.algorithms.advantages import has_signal
from openenv_pipe.config.schema import GroupRelativeAdvantageConfig, RunConfig
from openenv_pipe.environments.tasks import TaskOrder, build_order
from openenv_pipe.environments.tasks.mixed import MixedOrder
from openenv_pipe.pipeline.demonstrations import SourceSetup, find_demonstrations
from openenv_pipe.pipeline.league import Game, League, load_leagues, save_leagues
from openenv_pipe.pipeline.source_state import OrderState, SourceState
from openenv_pipe.rollout import RolloutContext, accept_groups, deaths_of_servers, play_groups
from openenv_pipe.rollout.context import PLAYER
from openenv_pipe.runs.checkpoints import StageStep
from openenv_pipe.system.progress import EpisodeCount
from openenv_pipe.types import Group

_log = logging.getLogger(__name__)


class GroupSource:
    """Provides the scored groups of each step, and samples later ones with the new weights.

    Of this class, the methods about sampling do nothing, for sources that sample none.
    """

    version: int  # of the current weights: the step of GRPO that they come from

    async def demonstrations(
        self, notify: Callable[[str], None], count: EpisodeCount
    ) -> list[Group]:
        """Return the groups that the warm start imitates.

        notify: shows a note about them. count: counts the episodes that are played for them.
        """
        raise NotImplementedError

    async def groups(self, step: int, count: EpisodeCount | None = None) -> list[Group]:
        """Return the groups of a step of GRPO. Call it once for each step, in order.

        count: counts the step's episodes, except those that earlier steps have begun.
        """
        raise NotImplementedError

    def finish(self, step: int) -> None:
        """Forget the groups of a step that the learner is done with.

        Until then they are kept, so that a run whose step fails can be resumed with them.
        """

    async def begin_update(self) -> None:
        """Announce that the learner changes the weights until `publish` is called."""

    async def publish(self, version: int) -> None:
        """Sample later groups with the policy's current weights."""

    async def go_back(self, step: int) -> None:
        """Forget what later weights have left, before the weights of `step` are loaded."""

    async def metrics(self) -> Mapping[str, float]:
        """Return what sampling and publishing have measured since the last call."""
        return {}

    async def settle(self) -> None:
        """Wait for groups that older weights began, and publish the current weights.

        Called before a checkpoint is saved, because it holds only the current weights.
        """

    def save(self, folder: Path) -> None:
        """Save the state that the next `groups` depends on. Call `settle` first."""

    def load(self, folder: Path) -> None:
        """Load the state from a checkpoint's folder; a fork may have only a part of it.

        Call it in torch's thread. Without a saved order, tasks are taken from the next step's on.
        """

    async def close(self) -> None:
        """Cancel the episodes that are still being played."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _StepGroups:
    version: int  # of the weights when the first episode began
    order: OrderState  # before the first task was taken
    playing: asyncio.Task[list[Group]]


class PlayedGroups(GroupSource):
    """Groups that the policy plays: on policy when a step begins, or ahead of the learner.

    With `max_staleness` 0 they are played when the step begins. With s above 0, the groups of the
    s next steps are played while the learner works on this one. A step's groups begin only when
    the weights are at most s versions behind those that will learn from them, so no group is ever
    older. Steps use groups in the order of their tasks, because using those that finish first would
    favour short episodes. An engine that cannot change its weights during episodes gets new ones
    when the running episodes have ended.

    Dynamic sampling (DAPO, arXiv:2503.14476): with `max_sampling_rounds` above 1, a further task is
    played for each group without a signal, until enough have one or the rounds are used up.
    """

    def __init__(
        self, config: RunConfig, rollout: RolloutContext, leagues: Sequence[League] = ()
    ) -> None:
        """leagues: earlier policies that play in games, which join when a step begins."""
        self.version = 0
        self._leagues = leagues
        self._config = config
        self._rollout = rollout
        self._engine = rollout.engine
        self._is_published = True  # False: `version` is not published to the engine yet
        self._environments = config.environments
        orders = {name: self._new_order(name) for name in self._environments}
        weights = {name: each.weight for name, each in config.beside.items()}
        self._order = MixedOrder(orders, {"": 1.0, **weights}) if weights else orders[""]
        self._num_taken: int | None = None  # see `OrderState`
        self._batches: dict[int, _StepGroups] = {}  # by step
        self._restored: dict[int, list[Group]] = {}  # by step: loaded from a checkpoint
        self._restored_order: OrderState | None = None  # before their tasks were taken

    def _new_order(self, name: str) -> TaskOrder:
        """Return the order of an environment's tasks at its start."""
        order = self._environments[name].env.tasks.order
        return build_order(order, self._rollout.environments[name].splits.train, self._config.seed)

    async def demonstrations(
        self, notify: Callable[[str], None], count: EpisodeCount
    ) -> list[Group]:
        """See `GroupSource`. With several environments, the groups are those of the first one."""
        return await find_demonstrations(
            SourceSetup(
                config=self._config,
                rollout=self._rollout.environments[""],
                # Not that of `groups`: a run that is resumed later asks for no demonstrations.
                order=self._new_order(""),
                notify=notify,
                count=count,
            )
        )

    async def groups(self, step: int, count: EpisodeCount | None = None) -> list[Group]:
        groups = self._restored.get(step)
        if groups is None:
            await self._begin(step, count or EpisodeCount())
            groups = await asyncio.shield(self._batches[step].playing)
        await self._publish_late()
        trainer = self._config.trainer
        last = min(step + trainer.max_staleness, trainer.steps)
        for ahead in range(step + 1, last + 1):
            await self._begin(ahead, EpisodeCount())
        return groups

    def finish(self, step: int) -> None:
        self._restored.pop(step, None)
        self._batches.pop(step, None)

    async def _begin(self, step: int, count: EpisodeCount) -> None:
        if step not in self._batches and step not in self._restored:
            for league in self._leagues:
                await league.join(self.version)
            self._batches[step] = _StepGroups(
                version=self.version,
                order=self._order_state(),
                playing=asyncio.create_task(self._collect(step, count)),
            )

    async def _collect(self, step: int, count: EpisodeCount) -> list[Group]:
        trainer = self._config.trainer
        wanted = trainer.tasks_per_step
        if self._num_taken is None:
            self._num_taken = (step - 1) * wanted
        deaths_before = deaths_of_servers(self._rollout)
        found = await self._play(step, f"step {step}", wanted, count)
        for number in range(2, trainer.max_sampling_rounds + 1):
            missing = wanted - len(set(map(_game_of, filter(self._has_signal, found))))
            if not missing:
                break
            found += await self._play(step, f"step {step} round {number}", missing, count)
        # Together, because the few tasks of a late round may all be ones that fail.
        await accept_groups(self._rollout, found, deaths_before)
        return found

    def _has_signal(self, group: Group) -> bool:
        trainer = self._environments[group.task.env].trainer
        assert isinstance(trainer.advantage, GroupRelativeAdvantageConfig)
        discount, mask = trainer.advantage.discount, trainer.loss.mask_truncated
        return has_signal(group, discount=discount, mask_truncated=mask)

    async def _play(
        self, step: int, label: str, num_tasks: int, count: EpisodeCount
    ) -> list[Group]:
        """Play and score groups of the next tasks in the order."""
        assert self._num_taken is not None
        trainer = self._config.trainer
        tasks = self._order.take(self._num_taken, num_tasks)
        self._num_taken += num_tasks
        count.total += num_tasks * trainer.group_size
        games: list[Game] = [(task, self._rollout.of(task).roles) for task in tasks]
        for league in self._leagues:
            games = league.cast(step, games, label)
        groups = await play_groups(
            self._rollout,
            [task for task, _ in games],
            group_size=trainer.group_size,
            temperature=trainer.temperature,
            seed=self._config.seed,
            label=label,
            roles=[roles for _, roles in games],
            count=count,
            score=self._rollout.score,
        )
        self._order.record([group for group in groups if group.task.split == "train"])
        return groups

    async def begin_update(self) -> None:
        await self._engine.begin_update(idle=not self._under_way())

    async def publish(self, version: int) -> None:
        self.version = version
        self._is_published = False
        if self._engine.capabilities.publishes_in_flight or not self._under_way():
            await self._publish_late()

    async def _publish_late(self) -> None:
        """Publish the weights that `publish` has deferred, if there are any."""
        if not self._is_published:
            await self._engine.publish(self.version)
            _log.debug("published the weights of step %d", self.version)
            self._is_published = True

    async def go_back(self, step: int) -> None:
        """See `GroupSource`. Games played ahead finish with the league that they began with.

        The next checkpoint has these games, and the league without its later members, so that a
        resumed run goes on in the same way.
        """
        if self._leagues:
            await self.clear_engine()
        for league in self._leagues:
            league.drop_after(step)

    async def clear_engine(self) -> None:
        """Prepare the engine for an evaluation: wait for its episodes, publish late weights."""
        under_way = self._under_way()
        if under_way and not self._engine.capabilities.publishes_in_flight:
            await asyncio.wait(under_way)
        await self._publish_late()

    async def metrics(self) -> Mapping[str, float]:
        return await self._engine.metrics()

    def _under_way(self) -> set[asyncio.Task[list[Group]]]:
        return {each.playing for each in self._batches.values() if not each.playing.done()}

    async def settle(self) -> None:
        older = [each.playing for each in self._batches.values() if self._is_older(each)]
        if not self._config.agent.plays_on_demand:
            return  # Clients may not come; unfinished groups are played again.
        if older:
            await asyncio.wait(older)
        await self._publish_late()

    def _is_older(self, batch: _StepGroups) -> bool:
        """Return whether older weights began it; groups of current weights can be played again."""
        return batch.version < self.version

    def save(self, folder: Path) -> None:
        self._state().write(folder)
        save_leagues(self._leagues, folder)

    def _state(self) -> SourceState:
        """Return the state after the groups that older weights have played."""
        ahead, orders = dict(self._restored), []
        if self._restored_order is not None and self._restored:
            orders.append(self._restored_order)
        for step, batch in sorted(self._batches.items()):
            orders.append(batch.order)
            playing = batch.playing
            if not self._is_older(batch) or not playing.done() or playing.exception():
                break
            ahead[step] = batch.playing.result()
        else:
            orders.append(self._order_state())
        return SourceState(
            version=self.version, ahead=ahead, order_before=orders[0], order_after=orders[-1]
        )

    def _order_state(self) -> OrderState:
        return OrderState(num_taken=self._num_taken, order=self._order.state())

    def load(self, folder: Path) -> None:
        load_leagues(self._leagues, folder)
        state = SourceState.read(folder)
        if state is None:
            self.version = StageStep.of(folder.parent).step
            return
        self.version = state.version
        self._num_taken = state.order_after.num_taken
        self._order.restore(state.order_after.order)
        self._restored, self._restored_order = dict(state.ahead), state.order_before

    async def close(self) -> None:
        playing = [batch.playing for batch in self._batches.values()]
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


def _game_of(group: Group) -> str:
    """Return what the groups of the players of a game have in common; else the group's own id."""
    return group.id.rpartition("/")[0] if PLAYER in group.task.labels else group.id
