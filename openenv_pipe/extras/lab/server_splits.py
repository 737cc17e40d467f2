"""Which tasks of training and evaluation an environment's server lists, if its reset takes them.

A server lists splits by OpenEnv's task API; its `reset` may still ignore the keywords `split` and
`index`, because OpenEnv drops keywords that an environment does not know.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from openenv_pipe.config.schema import EnvConfig, TaskRange, TasksConfig
from openenv_pipe.environments.client.session import Session
from openenv_pipe.environments.hosts.base import Host
from openenv_pipe.environments.tasks.server import ServerSplit, list_splits
from openenv_pipe.errors import StepRejectedError
from openenv_pipe.extras.lab.comparison import Told, told
from openenv_pipe.system.untrusted_text import quoted

INDEX = "index"
TRAIN, HELD_OUT = ("train",), ("eval", "validation", "test")  # names or types, the best one first
NUM_COMPARED = 8  # tasks of each split whose first observations are compared
NO_SPLIT = "no-such-split"
SEEDS_ALONE = (
    "tasks differ only in their seeds, and nothing says that eval seeds draw no tasks of training: "
    "`env check` counts eval tasks that look like training tasks"
)


async def split_keys(env: EnvConfig, host: Host) -> Mapping[str, Mapping[str, Any]] | None:
    """Return the keys of `env.tasks.train` and `env.tasks.eval` that name the server's own splits.

    None if the server does not list both, if its reset does not take them, or if the tasks of `env`
    are chosen in another way. Raises SessionError.
    """
    configs = (env.tasks.train, env.tasks.eval)
    if not are_seeds_alone(env.tasks):
        return None
    splits = await list_splits(host.urls[0], host.access)
    train = _named(splits, TRAIN)
    held_out = _named([each for each in splits if each is not train], HELD_OUT)
    if train is None or held_out is None:
        return None
    async with host.session() as session:
        try:
            if not await _takes_both(session, env, train, held_out):
                return None
        finally:
            await session.close()
    return {
        key: {
            "num_tasks": split.num_tasks,
            "index_key": INDEX,
            "reset": {**config.reset, "split": split.name},
        }
        for key, split, config in zip(("train", "eval"), (train, held_out), configs, strict=True)
    }


def are_seeds_alone(tasks: TasksConfig) -> bool:
    """True if nothing but seeds tells the tasks of training and evaluation apart."""
    return all(
        isinstance(each, TaskRange) and each.index_key is None and "split" not in each.reset
        for each in (tasks.train, tasks.eval)
    ) and (tasks.train.reset == tasks.eval.reset)


async def describe_splits(env: EnvConfig, host: Host, *, are_taken: bool) -> str | None:
    """Say which tasks the server lists, and what is not known about those of `env`.

    are_taken: whether `env` has the listed tasks.
    """
    splits = await list_splits(host.urls[0], host.access)
    listed = ", ".join(f"{each.num_tasks} of the split {quoted(each.name)}" for each in splits)
    if not splits:
        return SEEDS_ALONE if are_seeds_alone(env.tasks) else None
    if are_taken:
        return f"env.tasks has the tasks that the server lists: {listed}"
    if are_seeds_alone(env.tasks):
        return (
            f"the server lists tasks of its own ({listed}), but no two splits for training and "
            f"evaluation that its reset takes as keywords `split` and `{INDEX}`; so {SEEDS_ALONE}"
        )
    return f"the server lists tasks of its own: {listed} (docs/tasks.md says how to play them)"


def _named(splits: Sequence[ServerSplit], kinds: Sequence[str]) -> ServerSplit | None:
    """Return the first split that has tasks and one of these names, else one of these types."""
    keys = [(each.name, each) for each in splits] + [(each.kind, each) for each in splits]
    found = (each for kind in kinds for key, each in keys if key == kind and each.num_tasks)
    return next(found, None)


async def _takes_both(
    session: Session, env: EnvConfig, train: ServerSplit, held_out: ServerSplit
) -> bool:
    """True if resets show that `split` and `index` choose the task, with any seed.

    Each is taken if a wrong value is rejected, or if another value begins another task.
    """

    async def first(split: str, index: int) -> Told | None:
        """Return what a task begins with; None if its reset is rejected."""
        keywords = {**env.tasks.train.reset, "split": split, INDEX: index, "seed": 0}
        try:
            return told((await session.reset(keywords, env.reset_timeout_s)).observation)
        except StepRejectedError:
            return None

    indices = range(min(NUM_COMPARED, train.num_tasks, held_out.num_tasks))
    trained = [await first(train.name, index) for index in indices]
    others = [await first(held_out.name, index) for index in indices]
    again = await first(train.name, 0)
    if None in trained or None in others or again != trained[0]:
        return False
    takes_split = trained != others or await first(NO_SPLIT, 0) is None
    takes_index = (
        len({*trained}) > 1
        or len({*others}) > 1
        or await first(train.name, train.num_tasks) is None
    )
    return takes_split and takes_index
