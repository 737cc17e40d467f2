"""The state of a group source in a checkpoint: groups played ahead, and the order of tasks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openenv_pipe.runs.episodes import read_episodes, write_episodes
from openenv_pipe.system.files import read_json, write_json
from openenv_pipe.types import Group

ORDER, AHEAD = "order.json", "ahead.jsonl.gz"


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderState:
    """The position of training in the order of tasks."""

    num_taken: int | None  # tasks taken; None: `tasks_per_step` in each earlier step
    order: Mapping[str, Any]  # the order's own state


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceState:
    """The state that the groups of the next steps depend on, as a checkpoint stores it."""

    version: int  # of the weights
    ahead: Mapping[int, list[Group]]  # by step: groups that were played with older weights
    order_before: OrderState  # before the tasks of `ahead` were taken
    order_after: OrderState

    def write(self, folder: Path) -> None:
        ahead = {str(step): [group.id for group in groups] for step, groups in self.ahead.items()}
        state = {
            "version": self.version,
            "ahead": ahead,
            "order_before": asdict(self.order_before),
            "order_after": asdict(self.order_after),
        }
        write_json(folder / ORDER, state)
        if self.ahead:
            groups = [group for groups in self.ahead.values() for group in groups]
            write_episodes(folder / AHEAD, groups, folder=folder)

    @classmethod
    def read(cls, folder: Path) -> "SourceState | None":
        """Read the state that `write` wrote; None if the checkpoint has none.

        If a fork left the groups out, the order is the one before their tasks were taken.
        """
        if not (folder / ORDER).exists():
            return None
        state = read_json(folder / ORDER)
        before, after = (OrderState(**state[name]) for name in ("order_before", "order_after"))
        if not (folder / AHEAD).exists():
            return cls(version=state["version"], ahead={}, order_before=before, order_after=before)
        groups = {group.id: group for group in read_episodes(folder / AHEAD, folder=folder)}
        ahead = {int(step): [groups[id] for id in ids] for step, ids in state["ahead"].items()}
        return cls(version=state["version"], ahead=ahead, order_before=before, order_after=after)
