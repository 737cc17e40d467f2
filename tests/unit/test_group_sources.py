"""The sources of groups: rounds of dynamic sampling, groups played ahead, and resuming from a
checkpoint."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fakes import made_up_episode, made_up_group, run_config

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.environments.tasks import RangeTasks
from openenv_pipe.errors import FailureError
from openenv_pipe.pipeline import demonstrations, group_sources
from openenv_pipe.pipeline.group_sources import PlayedGroups
from openenv_pipe.pipeline.source_state import AHEAD, ORDER, SourceState
from openenv_pipe.rollout.metrics import summarise_staleness
from openenv_pipe.runs.episodes import write_episodes
from openenv_pipe.system.files import write_json
from openenv_pipe.system.progress import EpisodeCount
from openenv_pipe.types import Group, Status

pytestmark = pytest.mark.usefixtures("virtual_time")
WANTED = 4


class Rollout:
    """A rollout context that plays nothing and records calls. Groups of `dull` tasks have equal
    rewards."""

    def __init__(
        self,
        *,
        rounds=1,
        dull=lambda task: False,
        staleness=0,
        engine=None,
        duration_s=0.0,
        players=(),
        failing=lambda task: False,
    ):
        changes = {
            "trainer.tasks_per_step": WANTED,
            "trainer.max_sampling_rounds": rounds,
            "trainer.loss.normalise_groups": "with_signal",
            "trainer.max_staleness": staleness,
            "trainer.steps": 9,
            "env.tasks.order": "seed",
        }
        if staleness > 1:
            # the local engine has a lower limit of staleness
            changes["engine"] = {"type": "scripted", "policy": "a:b"}
        self.config = run_config(changes)
        self.splits = SimpleNamespace(train=RangeTasks("train", self.config.env.tasks.train))
        self.environments = {"": self}
        self.roles = {}  # no game
        self.calls = []
        self.engine = engine or Engine(in_flight=False)
        self._dull = dull
        self._duration_s = duration_s
        self._players = players
        self._failing = failing
        self.parts = {}
        self.runner = SimpleNamespace(num_deaths=0)
        self.accepted = []
        self.scorer = SimpleNamespace(accept=self.accepted.append)

    async def score(self, group):
        """Do nothing: episodes are made up with their rewards."""

    def of(self, task):
        return self

    async def collect(self, tasks, *, group_size, label):
        self.calls.append((label, [task.index for task in tasks]))
        version = self.engine.version
        await asyncio.sleep(self._duration_s)
        return [
            Group(
                id=f"{label}/{place}/{player}" if player else f"{label}/{place}",
                task=replace(task, labels={"player": player}) if player else task,
                episodes=[self._episode(task, member, version) for member in range(group_size)],
            )
            for place, task in enumerate(tasks)
            for player in self._players or (None,)
        ]

    def _episode(self, task, member, version):
        episode = made_up_episode(0.0 if self._dull(task.index) else float(member), member=member)
        episode.task = task
        for turn in episode.turns:
            turn.policy_versions = [version]
        if self._failing(task.index):
            episode.status, episode.error = Status.ERROR, f"row {task.index} is broken"
        return episode


@pytest.fixture(autouse=True)
def made_up_groups(monkeypatch):
    def play_groups(rollout, tasks, *, group_size, label, **_):
        return rollout.collect(tasks, group_size=group_size, label=label)

    monkeypatch.setattr(group_sources, "play_groups", play_groups)


def played_groups(rollout, *leagues):
    return PlayedGroups(rollout.config, rollout, leagues)


class League:
    """A league of numbers, which plays nothing and records when it changes."""

    def __init__(self, under_way=lambda: False):
        self.members = []
        self._under_way = under_way

    async def join(self, version):
        await asyncio.sleep(0)
        if version not in self.members:
            self.members.append(version)

    def cast(self, step, games, label):
        return games

    def drop_after(self, version):
        assert not self._under_way()
        self.members = [each for each in self.members if each <= version]

    def tensors(self):
        return {str(member): torch.zeros(1) for member in self.members}

    def restore(self, tensors):
        self.members = sorted(map(int, tensors))


class Engine:
    """An engine that knows the version of its weights, and whether it may publish during
    episodes."""

    def __init__(self, *, in_flight):
        self.capabilities = replace(VllmEngineConfig.capabilities, publishes_in_flight=in_flight)
        self.version = 0

    async def publish(self, version):
        self.version = version


async def test_one_round_takes_the_tasks_of_the_step_whatever_they_teach():
    rollout = Rollout(rounds=1, dull=lambda index: True)
    source = played_groups(rollout)
    assert len(await source.groups(1)) == len(await source.groups(2)) == WANTED
    assert rollout.calls == [("step 1", [0, 1, 2, 3]), ("step 2", [4, 5, 6, 7])]


async def test_further_rounds_replace_groups_without_a_signal():
    """A further round plays only as many groups as are missing, with the next tasks and other
    seeds."""
    rollout = Rollout(rounds=3, dull=lambda index: index in (0, 2, 5))
    count = EpisodeCount()
    groups = await played_groups(rollout).groups(1, count)
    assert count.total == 7 * rollout.config.trainer.group_size
    assert rollout.calls == [
        ("step 1", [0, 1, 2, 3]),
        ("step 1 round 2", [4, 5]),
        ("step 1 round 3", [6]),
    ]
    assert len(groups) == 7
    assert len({group.id for group in groups}) == 7


async def test_a_game_of_two_players_is_one_task_of_those_that_are_wanted():
    """Two groups of a game with a signal stand for one task."""
    rollout = Rollout(rounds=3, dull=lambda index: index in (0, 2), players=("x", "o"))
    groups = await played_groups(rollout).groups(1)
    assert rollout.calls == [("step 1", [0, 1, 2, 3]), ("step 1 round 2", [4, 5])]
    assert len(groups) == 2 * 6


async def test_rounds_are_bounded_and_end_as_soon_as_there_is_enough():
    hopeless = Rollout(rounds=3, dull=lambda index: True)
    assert len(await played_groups(hopeless).groups(1)) == 3 * WANTED
    telling = Rollout(rounds=3)
    await played_groups(telling).groups(1)
    assert telling.calls == [("step 1", [0, 1, 2, 3])]


async def test_a_round_of_failing_tasks_is_accepted_with_its_step():
    rollout = Rollout(rounds=3, dull=lambda task: task == 0, failing=lambda task: task in (4, 5))
    groups = await played_groups(rollout).groups(1)
    assert [group.task.index for group in groups] == [0, 1, 2, 3, 4, 5]
    assert rollout.accepted == [groups]
    broken = played_groups(Rollout(rounds=3, failing=lambda task: True))
    with pytest.raises(FailureError, match="all 96 episodes failed, the first with: row 0"):
        await broken.groups(1)


async def test_no_task_is_passed_over_or_taken_twice_also_after_a_checkpoint(tmp_path):
    rollout = Rollout(rounds=2, dull=lambda index: index == 1)
    source = played_groups(rollout)
    await source.groups(1)
    source.finish(1)
    source.save(tmp_path)
    resumed_rollout = Rollout(rounds=2, dull=lambda index: index == 1)
    resumed = played_groups(resumed_rollout)
    resumed.load(tmp_path)
    assert [group.task.index for group in await resumed.groups(2)] == [5, 6, 7, 8]
    assert [group.task.index for group in await source.groups(2)] == [5, 6, 7, 8]


async def learn(source, steps):
    """Take the groups of these steps and publish after each; return metrics by step."""
    found = {}
    for step in steps:
        groups = await source.groups(step)
        found[step] = summarise_staleness(groups, version=step - 1) | {
            "tasks": [group.task.index for group in groups]
        }
        await asyncio.sleep(0)  # stands for the learner's work
        await source.publish(step)
        source.finish(step)
    return found


@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_step_that_fails_after_its_episodes_gets_the_same_tasks_when_resumed(
    tmp_path, staleness
):
    def begin():
        return played_groups(Rollout(staleness=staleness, engine=Engine(in_flight=False)))

    source = begin()
    await learn(source, [1, 2])
    groups = await source.groups(3)
    await source.settle()
    source.save(tmp_path)
    await source.close()
    resumed = begin()
    resumed.load(tmp_path)
    await resumed.publish(2)
    again = await resumed.groups(3)
    assert [group.task.index for group in again] == [group.task.index for group in groups]
    assert summarise_staleness(again, version=2) == summarise_staleness(groups, version=2)
    resumed.finish(3)
    assert [group.task.index for group in await resumed.groups(4)] == [12, 13, 14, 15]
    await resumed.close()


@pytest.mark.parametrize(("staleness", "in_flight"), [(0, False), (1, False), (1, True), (3, True)])
async def test_staleness_is_used_and_never_passes_the_bound(staleness, in_flight):
    rollout = Rollout(staleness=staleness, engine=Engine(in_flight=in_flight), duration_s=0.005)
    source = played_groups(rollout)
    found = await learn(source, range(1, 10))
    ages = [metrics["staleness/max"] for metrics in found.values()]
    assert max(ages) == staleness
    assert ages[0] == 0
    taken = [index for metrics in found.values() for index in metrics["tasks"]]
    assert taken == list(range(9 * WANTED)), "in the order of the tasks, each once, no more"
    await source.close()


async def test_the_next_groups_are_played_while_the_learner_works():
    rollout = Rollout(staleness=1, engine=Engine(in_flight=True))
    source = played_groups(rollout)
    await source.groups(1)
    await asyncio.sleep(0)
    assert [label for label, _ in rollout.calls] == ["step 1", "step 2"]
    await source.close()


async def test_an_engine_that_must_not_change_under_way_gets_the_weights_later():
    engine = Engine(in_flight=False)
    source = played_groups(Rollout(staleness=1, engine=engine, duration_s=0.01))
    await source.groups(1)
    await source.publish(1)
    assert engine.version == 0, "step 2 is being played"
    await source.settle()
    assert engine.version == 1
    await source.close()


@pytest.mark.parametrize("last", [0, 1, 4])
async def test_a_resumed_run_learns_from_the_groups_that_were_played_ahead(tmp_path, last):
    """It gets the same groups with the versions that sampled them, and continues like the first
    run."""

    def begin():
        rollout = Rollout(staleness=1, engine=Engine(in_flight=False), duration_s=0.002)
        return played_groups(rollout)

    whole = begin()
    await learn(whole, range(1, last + 1))
    await whole.settle()
    whole.save(tmp_path)
    assert (tmp_path / AHEAD).exists() == (last > 0)
    resumed = begin()
    resumed.load(tmp_path)
    assert resumed.version == last
    await resumed.publish(last)
    rest = range(last + 1, 10)
    assert await learn(resumed, rest) == await learn(whole, rest)
    await asyncio.gather(whole.close(), resumed.close())


async def test_what_the_current_weights_began_is_dropped_and_played_again(tmp_path):
    """After an interruption in the first rollout batch, the saved task order is that from before
    it."""
    source = played_groups(Rollout(engine=Engine(in_flight=False), duration_s=10.0))
    waiting = asyncio.create_task(source.groups(1))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await source.settle()
    source.save(tmp_path)
    await source.close()
    resumed = played_groups(Rollout(engine=Engine(in_flight=False)))
    resumed.load(tmp_path)
    assert [group.task.index for group in await resumed.groups(1)] == [0, 1, 2, 3]


async def test_an_evaluation_waits_for_what_is_played_on_its_engine(tmp_path):
    """The evaluation also waits if a step had no signal and so published no new weights."""
    rollout = Rollout(staleness=1, engine=Engine(in_flight=False), duration_s=0.02)
    source = played_groups(rollout)
    await source.groups(1)
    await asyncio.sleep(0)
    assert any(not each.playing.done() for each in source._batches.values())
    await source.clear_engine()
    assert all(each.playing.done() for each in source._batches.values())
    await source.close()


async def test_a_fork_without_what_was_played_ahead_passes_over_no_task(tmp_path):
    rollout = Rollout(staleness=1, engine=Engine(in_flight=False), duration_s=0.002)
    source = played_groups(rollout)
    await learn(source, [1, 2])
    await source.settle()
    source.save(tmp_path)
    await source.close()
    (tmp_path / AHEAD).unlink()
    fork = played_groups(Rollout(engine=Engine(in_flight=False)))
    fork.load(tmp_path)
    assert [group.task.index for group in await fork.groups(3)] == [8, 9, 10, 11]


async def test_a_fork_without_the_order_of_tasks_keeps_league_and_version(tmp_path):
    folder = tmp_path / "step_000002" / "resume"
    folder.mkdir(parents=True)
    source = played_groups(Rollout(), League())
    await learn(source, [1, 2])
    source.save(folder)
    (folder / ORDER).unlink()
    league = League()
    fork = played_groups(Rollout(), league)
    fork.load(folder)
    assert (fork.version, league.members) == (2, [0, 1])
    assert [group.task.index for group in await fork.groups(3)] == [8, 9, 10, 11]


async def test_a_run_that_goes_back_ends_its_games_before_later_members_leave(tmp_path):
    engine = Engine(in_flight=False)
    league = League(lambda: source._under_way())
    source = played_groups(Rollout(staleness=1, engine=engine, duration_s=0.01), league)
    await learn(source, [1, 2])
    await source.groups(3)
    await asyncio.sleep(0)
    assert source._under_way()
    await source.go_back(1)
    assert league.members == [0, 1]
    await source.publish(3)
    source.finish(3)
    await source.settle()
    source.save(tmp_path)
    again = League()
    played_groups(Rollout(staleness=1), again).load(tmp_path)
    assert again.members == [0, 1]
    await source.close()


def test_the_files_of_a_checkpoint_keep_their_format(tmp_path):
    """Runs of earlier versions resume from their files order.json and ahead.jsonl.gz."""
    group = made_up_group([0.0, 1.0], id="step 3/0")
    before, after = ({"num_taken": taken, "order": {}} for taken in (8, 12))
    write_json(
        tmp_path / "order.json",
        {"version": 2, "ahead": {"3": [group.id]}, "order_before": before, "order_after": after},
    )
    written = (tmp_path / "order.json").read_bytes()
    write_episodes(tmp_path / "ahead.jsonl.gz", [group])
    state = SourceState.read(tmp_path)
    assert (state.version, state.order_after.num_taken) == (2, 12)
    assert [each.id for each in state.ahead[3]] == ["step 3/0"]
    (tmp_path / "again").mkdir()
    state.write(tmp_path / "again")
    assert (tmp_path / "again" / "order.json").read_bytes() == written


@pytest.fixture
def warm_start(monkeypatch):
    """Settings of a warm start of three episodes, which play nothing."""

    async def play(rollout, tasks, *, count, **_):
        count.finished += len(tasks)
        return []

    monkeypatch.setattr(demonstrations, "collect_groups", play)
    monkeypatch.setattr(demonstrations, "with_scripted_policy", lambda rollout, policy: rollout)
    policy = {"type": "scripted", "policy": "json:dumps", "num_episodes": 3}
    return {"trainer.warm_start.source": policy}


async def test_the_episodes_of_a_warm_start_are_counted(warm_start):
    rollout, count = Rollout(), EpisodeCount()
    rollout.config = run_config(warm_start)
    await played_groups(rollout).demonstrations(print, count)
    assert str(count) == "3 of 3 episodes are finished"


@pytest.mark.parametrize("order", ["curriculum", "shuffle"])
async def test_a_warm_start_does_not_change_the_tasks_of_later_steps(warm_start, order):
    """A run that is resumed after its warm start plays no demonstrations again."""
    states = []
    for plays_demonstrations in (True, False):
        rollout = Rollout()
        rollout.config = run_config({**warm_start, "env.tasks.order": order})
        source = played_groups(rollout)
        if plays_demonstrations:
            await source.demonstrations(print, EpisodeCount())
        tasks = [group.task.index for group in await source.groups(1)]
        states.append((tasks, source._state()))
    assert states[0] == states[1]
