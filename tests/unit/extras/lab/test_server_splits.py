"""Whether the splits that a server lists become the tasks of a block: only if reset takes them."""

import itertools
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from openenv_pipe.config.compose import compose_env
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.environments.tasks.server import ServerSplit
from openenv_pipe.errors import StepRejectedError
from openenv_pipe.extras.lab import server_splits
from openenv_pipe.extras.lab.server_splits import SEEDS_ALONE, describe_splits, split_keys
from openenv_pipe.extras.lab.targets import NO_BLOCK

SIZES = {"train": 80, "test": 10}
resets = itertools.count()


def follows_both(split, index, seed):
    return {"text": f"{split} {index}"}


def hides_its_tasks(split, index, seed):
    """All tasks begin alike, but a task that does not exist is rejected."""
    if not 0 <= index < SIZES[split]:
        raise IndexError(index)
    return {"text": "go", "task_id": f"{split}/{index}"}


def ignores_all(split, index, seed):
    return {"text": "go", "episode_id": str(next(resets))}


def ignores_the_split(split, index, seed):
    return {"text": str(index)}


def ignores_the_index(split, index, seed):
    return {"text": split}


def is_deaf(split, index, seed):
    return {"text": str(next(resets))}


def needs_more(split, index, seed):
    raise ValueError("please name a book")


class Session:
    def __init__(self, begin):
        self._begin = begin

    async def reset(self, keywords, timeout_s):
        try:
            return StepResult(self._begin(**keywords), None, done=False)
        except (LookupError, ValueError) as error:
            raise StepRejectedError("EXECUTION_ERROR", str(error)) from None

    async def close(self):
        pass


def host_of(begin):
    @asynccontextmanager
    async def session():
        yield Session(begin)

    return SimpleNamespace(urls=["http://here"], access=None, session=session)


@pytest.fixture
def env(monkeypatch):
    list_as(monkeypatch, [("test", "test", 10), ("train", "train", 80)])
    return compose_env([*NO_BLOCK, "env.name=x"]).env


def list_as(monkeypatch, splits):
    async def listed(url, access):
        return [ServerSplit(name=name, kind=kind, num_tasks=n) for name, kind, n in splits]

    monkeypatch.setattr(server_splits, "list_splits", listed)


@pytest.mark.parametrize("begin", [follows_both, hides_its_tasks])
async def test_splits_that_reset_takes_are_the_tasks(env, begin):
    assert await split_keys(env, host_of(begin)) == {
        "train": {"num_tasks": 80, "index_key": "index", "reset": {"split": "train"}},
        "eval": {"num_tasks": 10, "index_key": "index", "reset": {"split": "test"}},
    }
    told = await describe_splits(env, host_of(begin), are_taken=True)
    assert told.endswith("10 of the split 'test', 80 of the split 'train'")


@pytest.mark.parametrize(
    "begin", [ignores_all, ignores_the_split, ignores_the_index, is_deaf, needs_more]
)
async def test_splits_that_reset_does_not_take_leave_the_seeds_with_a_warning(env, begin):
    assert await split_keys(env, host_of(begin)) is None
    told = await describe_splits(env, host_of(begin), are_taken=False)
    assert "no two splits for training and evaluation that its reset takes" in told
    assert told.endswith(SEEDS_ALONE)


async def test_types_say_what_names_do_not(env, monkeypatch):
    list_as(monkeypatch, [("dev", "validation", 10), ("main", "train", 80), ("none", "test", 0)])
    found = await split_keys(env, host_of(follows_both))
    assert [keys["reset"]["split"] for keys in found.values()] == ["main", "dev"]
    list_as(monkeypatch, [("train", "train", 80)])
    assert await split_keys(env, host_of(follows_both)) is None
    list_as(monkeypatch, [])
    assert await split_keys(env, host_of(follows_both)) is None
    assert await describe_splits(env, host_of(follows_both), are_taken=False) == SEEDS_ALONE


async def test_tasks_that_are_chosen_already_stay(env, monkeypatch):
    chosen = compose_env([*NO_BLOCK, "env.name=x", "env.tasks.eval.index_key=number"]).env
    assert await split_keys(chosen, host_of(follows_both)) is None
    assert "docs/tasks.md" in await describe_splits(chosen, host_of(follows_both), are_taken=False)
