"""Where groups come from: rounds of dynamic sampling, and going on from a checkpoint."""

from types import SimpleNamespace

import pytest
from fakes import made_up_episode, run_config

from openenv_pipe.pipeline.sources import PlayedGroups
from openenv_pipe.tasks import RangeTasks
from openenv_pipe.types import Group

WANTED = 4


class Parts:
    """Plays nothing: groups of tasks in `dull` have no spread. Remembers what was asked for."""

    def __init__(self, *, rounds, dull=lambda task: False):
        changes = {"trainer.tasks_per_step": WANTED, "trainer.max_sampling_rounds": rounds}
        self.config = run_config(changes | {"env.tasks.order": "seed"})
        self.tasks = SimpleNamespace(train=RangeTasks("train", self.config.env.tasks.train))
        self.calls = []
        self._dull = dull

    async def collect(self, tasks, *, group_size, temperature, label):
        self.calls.append((label, [task.index for task in tasks]))
        return [
            Group(
                id=f"{label}/{place}",
                task=task,
                episodes=[
                    made_up_episode(0.0 if self._dull(task.index) else float(member), member=member)
                    for member in range(group_size)
                ],
            )
            for place, task in enumerate(tasks)
        ]


async def test_one_round_takes_the_tasks_of_the_step_whatever_they_teach():
    parts = Parts(rounds=1, dull=lambda index: True)
    source = PlayedGroups(parts)
    assert len(await source.groups(1)) == len(await source.groups(2)) == WANTED
    assert parts.calls == [("step 1", [0, 1, 2, 3]), ("step 2", [4, 5, 6, 7])]


async def test_further_rounds_replace_groups_without_a_signal():
    """Only as many as are missing, of the next tasks, and with other seeds than the first."""
    parts = Parts(rounds=3, dull=lambda index: index in (0, 2, 5))
    groups = await PlayedGroups(parts).groups(1)
    assert parts.calls == [
        ("step 1", [0, 1, 2, 3]),
        ("step 1 round 2", [4, 5]),
        ("step 1 round 3", [6]),
    ]
    assert len(groups) == 7
    assert len({group.id for group in groups}) == 7


async def test_rounds_are_bounded_and_end_as_soon_as_there_is_enough():
    hopeless = Parts(rounds=3, dull=lambda index: True)
    assert len(await PlayedGroups(hopeless).groups(1)) == 3 * WANTED
    telling = Parts(rounds=3)
    await PlayedGroups(telling).groups(1)
    assert telling.calls == [("step 1", [0, 1, 2, 3])]


async def test_no_task_is_passed_over_or_taken_twice_also_after_a_checkpoint(tmp_path):
    parts = Parts(rounds=2, dull=lambda index: index == 1)
    source = PlayedGroups(parts)
    await source.groups(1)
    source.save(tmp_path)
    resumed_parts = Parts(rounds=2, dull=lambda index: index == 1)
    resumed = PlayedGroups(resumed_parts)
    resumed.load(tmp_path)
    assert [group.task.index for group in await resumed.groups(2)] == [5, 6, 7, 8]
    assert [group.task.index for group in await source.groups(2)] == [5, 6, 7, 8]


def test_rounds_make_no_sense_where_all_groups_are_compared():
    advantage = {"baseline": "batch", "scale": "batch", "discount": 1.0}
    with pytest.raises(ValueError, match="set max_sampling_rounds=1"):
        run_config({"trainer.advantage": advantage, "trainer.max_sampling_rounds": 2})
