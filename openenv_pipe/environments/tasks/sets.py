"""Task sets: the numbered tasks of one split. The index alone determines the task."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from openenv_pipe.config.schema import ListedTasks, TaskRange
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.copies import copied
from openenv_pipe.types import Task

Labels = Mapping[str, str]  # from a column to the task's label in it


class TaskSet(Protocol):
    source: str  # where the tasks come from, for messages

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Task:
        """Return task `index`. Raises IndexError, or ConfigError for an invalid row."""

    def labels(self, index: int) -> Labels:
        """Return the labels of task `index`, without making the task."""


class RangeTasks:
    """Tasks made from their index: a seed, and a reset keyword if `index_key` is set."""

    def __init__(self, split: str, config: TaskRange) -> None:
        self.source = f"a range of {config.num_tasks}"
        self._split = split
        self._config = config

    def __len__(self) -> int:
        return self._config.num_tasks

    def __getitem__(self, index: int) -> Task:
        index = range(len(self))[index]
        reset = dict(copied(self._config.reset))
        if self._config.index_key is not None:
            reset[self._config.index_key] = index
        seed = self._config.seed_start + index
        name = f"{self._split}/{index}"
        return Task(id=name, split=self._split, index=index, seed=seed, reset=reset)

    def labels(self, index: int) -> Labels:
        return {}


class ListedRows:
    """Tasks made from rows: each column is a reset keyword, `seed` is the task's seed."""

    def __init__(
        self,
        split: str,
        config: ListedTasks,
        rows: Sequence[Mapping[str, Any]],
        source: str,
        names: Sequence[str] | None = None,
        labels: Sequence[Labels] = (),
    ) -> None:
        """names: of the tasks, for their ids; None: their numbers. labels: of each task; (): none.

        Raises ConfigError if there are no rows.
        """
        if not len(rows):
            raise ConfigError(f"env.tasks.{split}: {source} has no rows, and so no tasks")
        self.source = source
        self._split = split
        self._config = config
        self._rows = rows
        self._names = names
        self._labels = labels

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Task:
        index = range(len(self))[index]
        start = self._config.seed_start
        return self._task(index, 0 if start is None else start + index)

    def wherever(self, index: int) -> Task:
        """Return the task with a seed that its index does not change: that of its row, or 0."""
        return self._task(index, 0)

    def _task(self, index: int, seed: int) -> Task:
        reset = copied({**self._config.reset, **self._rows[index]})
        seed = reset.pop("seed", seed)
        if type(seed) is not int or seed < 0:
            raise ConfigError(
                f"env.tasks.{self._split}: row {index + 1} of {self.source} has seed={seed!r}, "
                "expected a whole number, at least 0"
            )
        return Task(
            id=f"{self._split}/{index if self._names is None else self._names[index]}",
            split=self._split,
            index=index,
            seed=seed,
            reset=reset,
            labels=self.labels(index),
        )

    def labels(self, index: int) -> Labels:
        return self._labels[index] if self._labels else {}


class SelectedTasks:
    """Some tasks of another set, whose numbers or names there stay in the ids."""

    def __init__(self, tasks: TaskSet, split: str, indices: Sequence[int], source: str) -> None:
        self.source = source
        self._tasks = tasks
        self._split = split
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Task:
        index = range(len(self))[index]
        task = self._tasks[self._indices[index]]
        name = task.id.partition("/")[2]
        return replace(task, id=f"{self._split}/{name}", split=self._split, index=index)

    def labels(self, index: int) -> Labels:
        return self._tasks.labels(self._indices[index])


class NamedTasks:
    """The tasks of an environment of `beside`, which have its name in their ids."""

    def __init__(self, tasks: TaskSet, env: str) -> None:
        self.source = tasks.source
        self._tasks = tasks
        self._env = env

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        task = self._tasks[index]
        return replace(task, id=f"{self._env}/{task.id}", env=self._env)

    def labels(self, index: int) -> Labels:
        return self._tasks.labels(index)
