"""The tasks of several environments in one sequence, in proportion to their weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from openenv_pipe.environments.tasks.order import TaskOrder
from openenv_pipe.types import Group, Task


class MixedOrder:
    """A `TaskOrder` that takes the tasks of each environment in its own order.

    Each place of the sequence belongs to the environment that is the furthest behind its share, so
    every stretch has nearly the shares of the weights. The places depend on the weights alone.
    """

    def __init__(self, orders: Mapping[str, TaskOrder], weights: Mapping[str, float]) -> None:
        """orders, weights: by the environment's name in its tasks."""
        self._orders = orders
        self._weights = weights
        self._places: list[tuple[str, int]] = []  # the environment, and its tasks taken before
        self._taken = dict.fromkeys(orders, 0)

    def take(self, start: int, count: int) -> list[Task]:
        while len(self._places) < start + count:
            name = min(self._taken, key=lambda each: (self._taken[each] + 1) / self._weights[each])
            self._places.append((name, self._taken[name]))
            self._taken[name] += 1
        places = self._places[start : start + count]
        tasks = {
            name: iter(order.take(own[0], len(own)))
            for name, order in self._orders.items()
            if (own := [before for each, before in places if each == name])
        }
        return [next(tasks[name]) for name, _ in places]

    def record(self, groups: Sequence[Group]) -> None:
        for name, order in self._orders.items():
            order.record([group for group in groups if group.task.env == name])

    def state(self) -> dict[str, Any]:
        return {name: order.state() for name, order in self._orders.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, order in self._orders.items():
            order.restore(state[name])
