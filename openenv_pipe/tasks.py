"""Which tasks a step or an evaluation plays, decided by the seed alone."""

import random

from openenv_pipe.config.schema import TaskRange
from openenv_pipe.types import Task


def make_task(split: str, config: TaskRange, index: int) -> Task:
    """Task `index` of a split."""
    reset = dict(config.reset)
    if config.index_key is not None:
        reset[config.index_key] = index
    return Task(
        id=f"{split}/{index}", split=split, index=index, seed=config.seed_start + index, reset=reset
    )


class TaskOrder:
    """All tasks of a split in an order drawn anew for each pass; no task waits for another pass."""

    def __init__(self, split: str, config: TaskRange, seed: int) -> None:
        self._split = split
        self._config = config
        self._seed = seed

    def take(self, start: int, count: int) -> list[Task]:
        """Tasks number start..start+count-1 of the endless sequence of passes."""
        return [self._task(number) for number in range(start, start + count)]

    def _task(self, number: int) -> Task:
        which_pass, place = divmod(number, self._config.num_tasks)
        order = list(range(self._config.num_tasks))
        random.Random(f"{self._seed}/{self._split}/{which_pass}").shuffle(order)
        return make_task(self._split, self._config, order[place])
