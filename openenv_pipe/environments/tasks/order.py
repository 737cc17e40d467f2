"""The order in which training takes its tasks.

What `take` returns follows from the seed, the position in the sequence, the groups recorded and the
tasks taken so far. `state` holds all that these groups and tasks contribute.
"""

import heapq
import json
import random
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean
from typing import Any, Protocol, TypeVar

from openenv_pipe.config.schema import OrderConfig, PythonOrderConfig
from openenv_pipe.environments.tasks.sets import TaskSet
from openenv_pipe.errors import ConfigError, PipeError
from openenv_pipe.system.python_targets import build_part
from openenv_pipe.system.user_code import UserCode
from openenv_pipe.system.user_numbers import shown
from openenv_pipe.types import Group, Task

NUM_RECENT = 3  # groups per task over which the success rate is measured
Number = TypeVar("Number", int, float)
Kind = tuple[tuple[str, str], ...]  # all labels of a task
EXPLORED_FRACTION = 0.25  # of a curriculum's tasks, chosen for being unseen the longest


class TaskOrder(Protocol):
    """An endless sequence of the tasks of one set.

    An order of your own (`env.tasks.order: {type: python, ...}`) is made by
    target(tasks, seed, **options), where `tasks` is the `TaskSet` of training. All its randomness
    must come from `seed` and the arguments of `take`, or a resumed run differs from the first.
    """

    def take(self, start: int, count: int) -> list[Task]:
        """Return tasks start..start+count-1 of the sequence, given the groups recorded so far."""

    def record(self, groups: Sequence[Group]) -> None:
        """Record the results of played groups."""

    def state(self) -> dict[str, Any]:
        """Return the effect of the recorded groups and the taken tasks as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that was saved with the same tasks and seed."""


def build_order(order: OrderConfig, tasks: TaskSet, seed: int) -> TaskOrder:
    """Build the order that `env.tasks.order` asks for.

    Raises ConfigError if it is a target that cannot be used.
    """
    match order:
        case "curriculum" | "curriculum_by_cost":
            return Curriculum(tasks, seed, by_cost=order == "curriculum_by_cost")
        case "shuffle":
            return Passes(tasks, seed)
        case "seed":
            return Passes(tasks, None)
    return UserOrder(order, tasks, seed)


class UserOrder:
    """A `TaskOrder` of a user, whose answers are checked."""

    def __init__(self, config: PythonOrderConfig, tasks: TaskSet, seed: int) -> None:
        """Raises ConfigError if the target cannot be used."""
        self._order = build_part("env.tasks.order", config, TaskOrder, tasks, seed)
        self._code = UserCode(f"env.tasks.order.target={config.target!r}", passed=(PipeError,))

    def take(self, start: int, count: int) -> list[Task]:
        taken = self._code.call_blocking(self._order.take, start, count)
        is_right = isinstance(taken, list | tuple) and len(taken) == count
        if not is_right or not all(isinstance(task, Task) for task in taken):
            raise ConfigError(
                f"{self._code.name}: take({start}, {count}) returned {shown(taken)}; expected a "
                f"list of {count} tasks of the task set"
            )
        return list(taken)

    def record(self, groups: Sequence[Group]) -> None:
        self._code.call_blocking(self._order.record, groups)

    def state(self) -> dict[str, Any]:
        state = self._code.call_blocking(self._order.state)
        try:
            if not isinstance(state, dict):
                raise TypeError("it is not a dict")
            json.dumps(state)
            if not _has_text_keys(state):
                raise TypeError("a key in it is not a string, but a resumed run would get one")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self._code.name}: state returned {shown(state)}; expected a dict that JSON can "
                f"hold: {error}"
            ) from None
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        self._code.call_blocking(self._order.restore, state)


def _has_text_keys(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(each) for key, each in value.items())
    return not isinstance(value, list | tuple) or all(map(_has_text_keys, value))


class Passes:
    """Repeated passes over all tasks, each shuffled anew, or in listed order without a seed."""

    def __init__(self, tasks: TaskSet, seed: int | None) -> None:
        self._tasks = tasks
        self._seed = seed

    def take(self, start: int, count: int) -> list[Task]:
        tasks = self._tasks
        places = range(start, start + count)
        if self._seed is None:
            return [tasks[place % len(tasks)] for place in places]
        passes = (divmod(place, len(tasks)) for place in places)
        return [tasks[shuffled(self._seed, number, len(tasks))[at]] for number, at in passes]

    def record(self, groups: Sequence[Group]) -> None:
        """Do nothing: the sequence is fixed."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""


class Curriculum:
    """Mostly tasks that the policy sometimes solves; for the rest, those unseen the longest.

    A task that always or never succeeds gives no learning signal. Tasks are drawn without
    replacement, in proportion to p (1 - p) of their recent success rate p, and with `by_cost` in
    inverse proportion to the tokens of their recent groups, so that a token buys the most signal.
    A fixed fraction, and all that is missing while too few rates are known, goes to tasks never
    played, then to those played longest ago. A group whose episodes all failed does not count.

    A task without a rate, but with labels, is drawn by the mean of the tasks with the same labels.
    """

    def __init__(self, tasks: TaskSet, seed: int, *, by_cost: bool) -> None:
        self._tasks = tasks
        self._seed = seed
        self._by_cost = by_cost
        self._rates: dict[int, deque[float]] = {}
        self._num_tokens: dict[int, deque[int]] = {}  # of the same groups; only with `by_cost`
        self._last_played: dict[int, int] = {}  # task index -> number of its latest group
        self._num_groups = 0
        labels = ((index, tasks.labels(index)) for index in range(len(tasks)))
        self._kinds = {index: tuple(sorted(each.items())) for index, each in labels if each}

    def take(self, start: int, count: int) -> list[Task]:
        picked: list[int] = []
        while len(picked) < count:  # A request may exceed the number of tasks.
            picked += self._round(start + len(picked), min(count - len(picked), len(self._tasks)))
        # Further steps may take tasks before these have been played.
        self._last_played |= dict.fromkeys(picked, self._num_groups)
        return [self._tasks[index] for index in picked]

    def record(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._last_played[group.task.index] = self._num_groups
            self._num_groups += 1
            if group.scored:
                rate = fmean(episode.success for episode in group.scored)
                _append(self._rates, group.task.index, rate)
                if self._by_cost:
                    num_tokens = max(1, sum(episode.num_tokens for episode in group.scored))
                    _append(self._num_tokens, group.task.index, num_tokens)

    def state(self) -> dict[str, Any]:
        last_played = [[index, number] for index, number in self._last_played.items()]
        state = {
            "rates": [[index, list(rates)] for index, rates in self._rates.items()],
            "last_played": last_played,
            "num_groups": self._num_groups,
        }
        if self._by_cost:
            state["num_tokens"] = [[index, list(all_)] for index, all_ in self._num_tokens.items()]
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rates = {index: deque(all_, maxlen=NUM_RECENT) for index, all_ in state["rates"]}
        if self._by_cost:
            num_tokens = state["num_tokens"]
            self._num_tokens = {index: deque(all_, maxlen=NUM_RECENT) for index, all_ in num_tokens}
        self._last_played = dict(state["last_played"])
        self._num_groups = state["num_groups"]

    def _round(self, start: int, count: int) -> list[int]:
        draw = random.Random(f"{self._seed}/curriculum/{start}")
        weights = self._weights()
        # By the place in the order, so that small requests explore as much as large ones.
        first, last = (int(EXPLORED_FRACTION * each) for each in (start, start + count))
        num_known = min(count - (last - first), len(weights))
        known = _draw_without_replacement(draw, weights, num_known)
        places = shuffled(self._seed, 0, len(self._tasks))
        unseen_longest = heapq.nsmallest(
            count,
            (place for place in range(len(places)) if places[place] not in known),
            key=lambda place: (self._last_played.get(places[place], -1), place),
        )
        return [*known, *(places[place] for place in unseen_longest)][:count]

    def _weights(self) -> dict[int, float]:
        """Return the weights of the tasks with a signal, by their index."""
        rates = self._means(self._rates)
        weights = {index: rate * (1.0 - rate) for index, rate in rates.items() if 0 < rate < 1}
        if not self._by_cost or not weights:
            return weights
        costs = self._means(self._num_tokens)
        usual = fmean(costs[index] for index in weights)
        return {index: weight * usual / costs[index] for index, weight in weights.items()}

    def _means(self, recent: Mapping[int, deque[Number]]) -> dict[int, float]:
        """Return each task's mean, in a fixed order; without values, it is that of its labels."""
        means = {index: fmean(recent[index]) for index in sorted(recent)}
        by_kind: dict[Kind, list[float]] = {}
        for index, mean in means.items():
            if index in self._kinds:
                by_kind.setdefault(self._kinds[index], []).append(mean)
        of_kinds = {kind: fmean(values) for kind, values in by_kind.items()}
        for index, kind in self._kinds.items():
            if kind in of_kinds:
                means.setdefault(index, of_kinds[kind])
        return means


def _append(recent: dict[int, deque[Number]], index: int, value: Number) -> None:
    recent.setdefault(index, deque(maxlen=NUM_RECENT)).append(value)


def _draw_without_replacement(
    draw: random.Random, weights: dict[int, float], count: int
) -> dict[int, None]:
    """Return `count` keys in the order drawn (Efraimidis and Spirakis, 2006)."""
    keys = {index: draw.random() ** (1.0 / weight) for index, weight in weights.items()}
    return dict.fromkeys(heapq.nlargest(count, keys, key=lambda index: keys[index]))


@lru_cache(maxsize=2)  # A step takes many tasks of one pass.
def shuffled(seed: int, which_pass: int, num_tasks: int) -> Sequence[int]:
    order = list(range(num_tasks))
    random.Random(f"{seed}/train/{which_pass}").shuffle(order)
    return tuple(order)
