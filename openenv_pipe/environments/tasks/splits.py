"""The train and eval splits of a run, checked to share no task."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from openenv_pipe.config.schema import (
    RunConfig,
    TaskDataset,
    TaskFile,
    TaskFolders,
    TaskRange,
    TasksConfig,
    TaskServer,
    TaskShare,
)
from openenv_pipe.environments.tasks.data_sets import read_dataset
from openenv_pipe.environments.tasks.rows import read_file, read_folders, require_sendable
from openenv_pipe.environments.tasks.server import server_rows
from openenv_pipe.environments.tasks.sets import (
    ListedRows,
    NamedTasks,
    RangeTasks,
    SelectedTasks,
    TaskSet,
)
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.http import Access
from openenv_pipe.types import Task

KnownSets = Mapping[str, TaskSet]

MAX_LABELS = 10  # that a warning names
JSON_TYPES = {
    str: "text",
    bool: "a truth value",
    **dict.fromkeys((int, float), "a number"),
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """The task sets for training and for evaluation."""

    train: TaskSet
    eval: TaskSet

    def named(self, env: str) -> "Splits":
        """Return the same tasks, as tasks of the environment `env` of `beside`."""
        return Splits(train=NamedTasks(self.train, env), eval=NamedTasks(self.eval, env))


def known_splits(config: RunConfig) -> KnownSets:
    """Read the task sets that need no server, by split, so that mistakes show before a start.

    It blocks the calling thread.

    Raises ConfigError: A source cannot be read, the splits share a task, or the evaluation asks for
    more tasks than there are.
    """
    known = read_known_sets(config.env.tasks)
    _check(config, known)
    return known


def read_known_sets(config: TasksConfig) -> KnownSets:
    """Read the task sets that need no server, without checking them against an evaluation."""
    known: dict[str, TaskSet] = {}
    for split in ("train", "eval"):
        key = f"env.tasks.{split}"
        match getattr(config, split):
            case TaskRange() as tasks:
                known[split] = RangeTasks(split, tasks)
            case TaskFile() | TaskDataset() as tasks:
                found = read_file(tasks, key) if tasks.type == "file" else read_dataset(tasks, key)
                known[split] = ListedRows(
                    split, tasks, found.resets, tasks.path, labels=found.labels
                )
            case TaskFolders() as tasks:
                rows = read_folders(tasks, key)
                names = [Path(row["path"]).name for row in rows]
                known[split] = ListedRows(split, tasks, rows, tasks.path, names)
            case TaskShare() as tasks:
                listed = known["train"]
                assert isinstance(listed, ListedRows)  # as the schema has checked
                known["train"], known[split] = _divided(listed, tasks)
    return known


def _divided(tasks: ListedRows, config: TaskShare) -> tuple[TaskSet, TaskSet]:
    """Divide the training tasks into those that are left for training, and the held-out share.

    The tasks with the smallest hashes are held out. Tasks with one value of `config.by` share a
    hash, and so a part: the hash of the task if they are all equal, else that of the value.

    Raises ConfigError if a part is empty, or a task has no value of `config.by`.
    """
    each = [tasks.wherever(index) for index in range(len(tasks))]
    whole = [_identity(task) for task in each]
    values = (
        whole if config.by is None else [_value(task, config.by, tasks.source) for task in each]
    )
    equal: dict[str, set[str]] = {}
    for value, identity in zip(values, whole, strict=True):
        equal.setdefault(value, set()).add(identity)
    by_value = {
        value: hashlib.sha256((min(rows) if len(rows) == 1 else value).encode()).digest()
        for value, rows in equal.items()
    }
    hashes = [by_value[value] for value in values]
    num_held_out = round(config.share * len(tasks))
    last = sorted(hashes)[num_held_out - 1] if num_held_out else b""
    parts = [
        [index for index, each in enumerate(hashes) if (each <= last) is is_held_out]
        for is_held_out in (False, True)
    ]
    source = tasks.source
    if num_repeated := len(tasks) - len(equal):
        what = f"repeat the {config.by} of another" if config.by else "equal another"
        source += f", in which {num_repeated} of {len(tasks)} rows {what}"
    if not all(parts):
        raise ConfigError(
            f"env.tasks.eval.share={config.share:g} of the {len(tasks)} tasks of {source} leaves "
            "none for training or none for the evaluation; set another share, or add rows"
        )
    return (
        SelectedTasks(tasks, "train", parts[0], source),
        SelectedTasks(tasks, "eval", parts[1], source),
    )


def _value(task: Task, keyword: str, source: str) -> str:
    """Return the task's value of a reset keyword as JSON. Raises ConfigError without one."""
    if keyword not in task.reset:
        raise ConfigError(
            f"env.tasks.eval.by={keyword!r}: row {task.index + 1} of {source} has no such reset "
            f"keyword; it has {', '.join(task.reset) or 'nothing'}; name one, or set null"
        )
    return json.dumps(task.reset[keyword], sort_keys=True)


async def open_splits(config: RunConfig, known: KnownSets, url: str, access: Access) -> Splits:
    """Complete the task sets with those listed by the server at `url`. Raises as `known_splits`."""
    sets = dict(known)
    tasks = config.env.tasks
    for split, each in (("train", tasks.train), ("eval", tasks.eval)):
        if isinstance(each, TaskServer):
            rows = await server_rows(url, access, each.split, f"env.tasks.{split}")
            sets[split] = ListedRows(split, each, rows, f"split {each.split!r} of the server")
    if len(sets) > len(known):
        _check(config, sets)
    return Splits(**sets)


def _check(config: RunConfig, sets: KnownSets) -> None:
    """Check the size of the evaluation, and that the known splits share no task."""
    held_out = sets.get("eval")
    if held_out is not None and config.eval.num_tasks > len(held_out):
        raise ConfigError(
            f"eval.num_tasks={config.eval.num_tasks} is more than the {len(held_out)} tasks of "
            f"env.tasks.eval ({held_out.source}); lower it, or hold out more of them, such as by "
            "env.tasks.eval.share"
        )
    tasks = config.env.tasks
    both_ranges = isinstance(tasks.train, TaskRange) and isinstance(tasks.eval, TaskRange)
    if len(sets) == 2 and not both_ranges:  # The schema has checked two ranges.
        _reject_shared_tasks(Splits(**sets))


def _reject_shared_tasks(splits: Splits) -> None:
    """Raise if a train task is also an eval task."""
    held_out = {
        _identity(task): task for task in map(splits.eval.__getitem__, range(len(splits.eval)))
    }
    for index in range(len(splits.train)):
        task = splits.train[index]
        twin = held_out.get(_identity(task))
        if twin is not None:
            raise ConfigError(
                f"the train and eval splits share tasks: row {task.index + 1} of "
                f"{splits.train.source} and row {twin.index + 1} of {splits.eval.source} are both "
                f"reset with seed {task.seed} and {json.dumps(task.reset)[:200]}; remove it from "
                "one of them"
            )


def split_warnings(config: TasksConfig, splits: Splits) -> list[str]:
    """Return what makes the eval split a bad measure of training.

    It may have shared questions, missing labels, or values of another type.
    """
    shared = shared_values(config, splits)
    return [
        *([shared] if shared is not None else []),
        *_equal_indices(config),
        *missing_labels(config, splits),
        *other_types(config, splits),
    ]


def _equal_indices(config: TasksConfig) -> Iterator[str]:
    """Warn of two ranges whose tasks differ in nothing but the seed."""
    train, held_out = config.train, config.eval
    if not isinstance(train, TaskRange) or not isinstance(held_out, TaskRange):
        return
    if train.index_key is not None and (train.index_key, train.reset) == (
        held_out.index_key,
        held_out.reset,
    ):
        yield (
            f"eval task i and training task i are both reset with {train.index_key}=i and differ "
            "only in their seeds; unless the environment makes its tasks from the seed, set "
            "another env.tasks.eval.reset, such as the name of a split"
        )


def count_labels(tasks: TaskSet) -> dict[str, Counter[str]]:
    """Count the tasks of each label, by its column."""
    counts: dict[str, Counter[str]] = {}
    for index in range(len(tasks)):
        for column, label in tasks.labels(index).items():
            counts.setdefault(column, Counter())[label] += 1
    return counts


def missing_labels(config: TasksConfig, splits: Splits) -> Iterator[str]:
    """Name the labels of training tasks that no eval task has, for each column.

    A column that has no labels at all in the eval split is left out.
    """
    if not isinstance(config.train, TaskFile | TaskDataset) or not config.train.labels:
        return
    trained, held_out = count_labels(splits.train), count_labels(splits.eval)
    advice = f"add rows of it to {splits.eval.source}"
    if isinstance(config.eval, TaskShare):
        advice = f"raise env.tasks.eval.share={config.eval.share:g}"
    for column, counts in trained.items():
        missing = [label for label in counts if label not in held_out.get(column, counts)]
        if missing:
            shown = ", ".join(f"{label!r:.60}" for label in missing[:MAX_LABELS])
            if len(missing) > MAX_LABELS:
                shown += f" and {len(missing) - MAX_LABELS} more"
            yield (
                f"no eval task has the {column} {shown}, which "
                f"{sum(counts[label] for label in missing)} of {len(splits.train)} training tasks "
                f"have, so no evaluation shows what the model does with it; {advice}"
            )


def shared_values(config: TasksConfig, splits: Splits) -> str | None:
    """Say how many eval tasks share their question with a training task; None if none does.

    The question is the first keyword that `required` lists, such as that of env=questions.
    """
    if not isinstance(config.train, TaskFile | TaskDataset) or not config.train.required:
        return None
    keyword = config.train.required[0]
    trained, held_out = _by_value(splits.train, keyword), _by_value(splits.eval, keyword)
    shared = [value for value in held_out if value in trained]
    if not shared:
        return None
    advice = f"remove them from one of {splits.train.source} and {splits.eval.source}"
    if isinstance(config.eval, TaskShare):
        advice = f"set env.tasks.eval.by={keyword}"
    first = shared[0]
    return (
        f"{sum(len(held_out[each]) for each in shared)} of {len(splits.eval)} eval tasks have the "
        f"{keyword} of a training task, so the evaluation may show what was memorized: "
        f"{held_out[first][0]} and {trained[first][0]} have {first:.100}; {advice}"
    )


def other_types(config: TasksConfig, splits: Splits) -> Iterator[str]:
    """Name the reset keywords whose values have other types in the eval split than in training.

    A column of a CSV file is text as a whole if one cell is not a number, so one file may have text
    where the other one has numbers. An environment that compares replies with such values judges
    them differently.
    """
    if not all(isinstance(each, TaskFile | TaskDataset) for each in (config.train, config.eval)):
        return
    trained, held_out = _types(splits.train), _types(splits.eval)
    for keyword, types in trained.items():
        others = held_out.get(keyword, types)
        if types.isdisjoint(others):
            yield (
                f"the reset keyword {keyword!r} is {' or '.join(sorted(types))} in all training "
                f"tasks, and {' or '.join(sorted(others))} in all eval tasks, so the environment "
                "may judge the same reply differently; a CSV column is text as a whole if one "
                "cell is no number that prints as it is written, such as 1.10, 007 or an empty "
                f"one; write {keyword!r} in {splits.train.source} and {splits.eval.source} alike"
            )


def _types(tasks: TaskSet) -> dict[str, set[str]]:
    """Return the JSON types of each reset keyword's values, in words and without null."""
    found: dict[str, set[str]] = {}
    for index in range(len(tasks)):
        for keyword, value in tasks[index].reset.items():
            if value is not None:
                found.setdefault(keyword, set()).add(JSON_TYPES.get(type(value), "another type"))
    return found


def _by_value(tasks: TaskSet, keyword: str) -> dict[str, list[str]]:
    """Return the ids of the tasks that have the reset keyword, by its value as JSON."""
    found: dict[str, list[str]] = {}
    for task in map(tasks.__getitem__, range(len(tasks))):
        if keyword in task.reset:
            value = json.dumps(task.reset[keyword], sort_keys=True, ensure_ascii=False)
            found.setdefault(value, []).append(task.id)
    return found


def _identity(task: Task) -> str:
    """Return a key that is equal for tasks with equal resets.

    Raises ConfigError if the reset cannot be sent.
    """
    require_sendable(task.reset, f"task {task.id}", f"env.tasks.{task.split}")
    return json.dumps([task.seed, task.reset], sort_keys=True)
