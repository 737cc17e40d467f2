"""The tasks of both splits, and the order in which training takes them."""

from openenv_pipe.environments.tasks.order import TaskOrder, build_order
from openenv_pipe.environments.tasks.sets import RangeTasks, TaskSet
from openenv_pipe.environments.tasks.splits import (
    Splits,
    count_labels,
    known_splits,
    open_splits,
    read_known_sets,
    split_warnings,
)

__all__ = [
    "RangeTasks",
    "Splits",
    "TaskOrder",
    "TaskSet",
    "build_order",
    "count_labels",
    "known_splits",
    "open_splits",
    "read_known_sets",
    "split_warnings",
]
