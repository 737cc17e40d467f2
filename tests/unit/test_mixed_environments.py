"""Several environments in one run: their configuration, their tasks' order, and who plays them."""

import asyncio
from collections import Counter
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
import run_samples

from openenv_pipe.commands.evaluate import on_the_same_tasks
from openenv_pipe.commands.findings import Result, has_failed
from openenv_pipe.commands.thresholds import compare_with_thresholds, measured_of
from openenv_pipe.config.compose import amend, compose
from openenv_pipe.config.render import as_yaml
from openenv_pipe.environments.tasks import RangeTasks, Splits, build_order
from openenv_pipe.environments.tasks.mixed import MixedOrder
from openenv_pipe.environments.tasks.sets import NamedTasks
from openenv_pipe.errors import ConfigError, FailureError
from openenv_pipe.models.teacher import check_teacher, find_teachers
from openenv_pipe.pipeline.requirements import REQUIREMENTS
from openenv_pipe.reports.eval_table import Row
from openenv_pipe.rollout import RolloutContext, collect_groups, play_groups
from openenv_pipe.runs.differences import find_other_facts
from openenv_pipe.runs.find import SelectedModel
from openenv_pipe.runs.trust import CODE
from openenv_pipe.system.intervals import Interval
from openenv_pipe.types import Episode, Group, Status

BESIDE = ("conf=smoke", "beside.catch.conf=catch")


def composed(*overrides):
    return compose([*BESIDE, *overrides]).config


# --- configuration -----------------------------------------------------------------------------


def test_an_experiment_brings_its_blocks_and_given_keys_win():
    config = composed("beside.catch.weight=0.5", "beside.catch.env.max_turns=3")
    own, catch = config.environments[""], config.environments["catch"]
    alone = compose(["conf=catch"]).config
    assert own.env == compose(["conf=smoke"]).config.env
    assert catch.env == alone.env.model_copy(update={"max_turns": 3})
    assert (catch.reward, catch.eval, catch.host) == (alone.reward, alone.eval, alone.host)
    assert catch.trainer.advantage == alone.trainer.advantage
    assert (own.trainer.warm_start.steps, catch.trainer.warm_start.steps) == (2, 0)
    assert config.beside["catch"].weight == 0.5
    assert config.max_episode_tokens == max(own.env.max_episode_tokens, 64)


def test_the_origins_of_its_keys_are_the_files_of_its_experiment():
    shown = as_yaml(compose([*BESIDE, "beside.catch.env.max_turns=3"]))
    block = shown.partition("\n  catch:\n")[2].partition("\n\n")[0]
    assert "max_turns: 3  # override beside.catch.env.max_turns=3\n" in block
    assert "package: catch  # shipped env/catch.yaml\n" in block
    values = [line.strip() for line in block.splitlines() if not line.rstrip().endswith(":")]
    assert [line for line in values if line and "  # " not in line] == [
        "weight: 1.0",
        "teacher: null",
    ]


def test_the_prompts_are_those_of_the_runs_own_model():
    hub = composed("model=hub", "model.path=some/model").beside["catch"].env
    assert hub.adapter != composed().beside["catch"].env.adapter


def test_a_saved_run_is_amended():
    saved = composed()
    changed = amend(saved, ["beside.catch.weight=3", "beside.echo.conf=echo"])
    assert changed.beside["catch"] == saved.beside["catch"].model_copy(update={"weight": 3.0})
    assert changed.beside["echo"].env.name == "echo"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["beside.other.conf=nothing"], "there is no such experiment"),
        (
            ["beside.other.weight=1"],
            "beside.other.conf is missing: expected the name of an experiment",
        ),
        (["beside.other.conf=[echo,catch]"], "expected the name of an experiment"),
        (["beside.catch.weight=0"], "beside.catch.weight=0: expected a number, more than 0"),
        (
            ["beside.catch.nothing=1"],
            "beside.catch.nothing=1: there is no such key; this block has weight, env, ",
        ),
        (["beside=3"], "beside=3: expected a mapping"),
        (
            ["beside.catch.eval.num_tasks=100000"],
            r"beside.catch: eval.num_tasks=100000 with env.tasks.eval.num_tasks=.*: there are not",
        ),
        (["beside.wordle.conf=echo"], "beside=.* with env.name=wordle: metrics could not tell"),
        (["agent=codex"], "programs and clients play one environment"),
    ],
)
def test_what_does_not_go_together_names_the_environment(overrides, said):
    with pytest.raises(ConfigError, match=said):
        composed(*overrides)


def test_code_of_every_environment_needs_trust():
    for key in ("env.command", "env.package", "host.image", "judge.base_url", "env.variables.A"):
        assert CODE.fullmatch(key) and CODE.fullmatch(f"beside.other.{key}")
    assert CODE.fullmatch("beside.other.env.baselines.expert")
    assert CODE.fullmatch("beside.other.teacher")


DISTILLING = ("trainer=distillation", "trainer.loss.kl.reference=first")


def teachers_of(*overrides):
    return [
        (place.key, place.reference, place.environments)
        for place in find_teachers(composed(*overrides))
    ]


def test_each_environment_may_have_its_own_teacher():
    shared = [("trainer.loss.kl.reference", "first", ("", "catch"))]
    assert (
        teachers_of(*DISTILLING) == teachers_of(*DISTILLING, "beside.catch.teacher=first") == shared
    )
    assert teachers_of(*DISTILLING, "beside.catch.teacher=second") == [
        ("trainer.loss.kl.reference", "first", ("",)),
        ("beside.catch.teacher", "second", ("catch",)),
    ]
    assert teachers_of(*DISTILLING, "trainer.loss.kl.coef=0", "beside.catch.teacher=second") == []
    assert teachers_of() == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["beside.catch.teacher=second"], "trainer.loss.kl.reference=null: env has no teacher"),
        (
            [*DISTILLING, "beside.catch.teacher=http://127.0.0.1:1/v1"],
            "beside.catch: trainer.loss.kl.reference=.*estimator=exact: a server gives",
        ),
    ],
)
def test_teachers_that_do_not_go_together_are_rejected(overrides, said):
    with pytest.raises(ConfigError, match=said):
        composed(*overrides)


def test_a_missing_teacher_is_named_by_its_key():
    config = composed(*DISTILLING, "trainer.loss.kl.coef=1", "beside.catch.teacher=/no/folder")
    with pytest.raises(ConfigError, match=r"beside\.catch\.teacher='/no/folder' is neither"):
        check_teacher(find_teachers(config)[1])


# --- tasks -------------------------------------------------------------------------------------


def tasks_of(config, env=""):
    tasks = RangeTasks("train", config.environments[env].env.tasks.train)
    return NamedTasks(tasks, env) if env else tasks


def order_of(config, weights, kind="seed"):
    orders = {env: build_order(kind, tasks_of(config, env), 0) for env in weights}
    return MixedOrder(orders, weights)


def test_the_tasks_of_a_stretch_have_the_shares_of_the_weights():
    order = order_of(composed(), {"": 1.0, "catch": 0.5})
    taken = order.take(0, 30)
    assert Counter(task.env for task in taken) == {"": 20, "catch": 10}
    assert [task.id for task in taken[:3]] == ["train/0", "train/1", "catch/train/0"]
    for start in range(0, 28, 3):
        assert [task.env for task in taken[start : start + 3]].count("catch") == 1
    again = order_of(composed(), {"": 1.0, "catch": 0.5})
    assert again.take(20, 10) == taken[20:]


def test_each_environment_has_the_state_of_its_own_order():
    weights = {"": 1.0, "catch": 1.0}
    order, other = (order_of(composed(), weights, "curriculum") for _ in range(2))
    played = [
        Group(id=task.id, task=task, episodes=[Episode(task=task, member=0, seed=0)])
        for task in order.take(0, 4)
    ]
    order.record(played)
    assert {*order.state()} == {"", "catch"}
    assert [each["num_groups"] for each in order.state().values()] == [2, 2]
    other.restore(order.state())
    assert other.take(4, 6) == order.take(4, 6)


# --- playing -----------------------------------------------------------------------------------


class Runner:
    """Notes which context each episode came with, and how many play at once."""

    num_deaths = 0

    def __init__(self, name, capacity):
        self.name, self.capacity = name, capacity
        self.num_playing = self.most = 0

    def facts(self):
        return {"name": self.name}

    async def play(self, context, spec):
        self.num_playing += 1
        self.most = max(self.most, self.num_playing)
        await context.engine.turn()
        self.num_playing -= 1
        assert context.env.name == self.name
        turns = [run_samples.turn(Random(0))]
        return Episode(
            task=spec.task, member=spec.member, seed=spec.seed, status=Status.DONE, turns=turns
        )


class Scorer:
    def __init__(self):
        self.scored, self.accepted = [], []

    async def score(self, group):
        self.scored.append(group.task.env)

    def accept(self, groups):
        self.accepted += groups


class TogetherEngine:
    """Answers only when all episodes that may play at once have asked, as `engine=local` does."""

    max_episodes = 100

    def begin_rollouts(self, num_episodes, limit):
        self.num_left, self.limit, self.waiting = num_episodes, limit, []
        return 0

    async def turn(self):
        self.waiting.append(asyncio.get_running_loop().create_future())
        if len(self.waiting) == min(self.limit, self.num_left):
            waiting, self.waiting = self.waiting, []
            for each in waiting:
                each.set_result(None)
            self.num_left -= len(waiting)
        else:
            await self.waiting[-1]

    def end_episode(self, number):
        pass


def mixed(contexts):
    """The context of a run of these environments, as the pipeline makes it."""
    named = {
        env: replace(each, splits=each.splits.named(env)) if env else each
        for env, each in contexts.items()
    }
    return replace(named[""], parts=named)


def context_of(config, env, capacity, engine):
    one = config.environments[env]
    splits = Splits(
        train=RangeTasks("train", one.env.tasks.train), eval=RangeTasks("eval", one.env.tasks.eval)
    )
    runner = Runner(one.env.name, capacity)
    return RolloutContext(
        env=one.env, loop=runner, splits=splits, chat=None, engine=engine, scorer=Scorer()
    )


@pytest.mark.parametrize("capacities", [(8, 1), (1, 8), (2, 3), (50, 50), (1, 1)])
async def test_each_episode_is_played_and_scored_by_its_own_environment(capacities):
    """Whatever the sessions of each are, no episode waits for one while the engine waits for it."""
    config, engine = composed(), TogetherEngine()
    contexts = {
        env: context_of(config, env, capacity, engine)
        for env, capacity in zip(("", "catch"), capacities, strict=True)
    }
    context = mixed(contexts)
    parts = context.environments
    tasks = [parts[env].splits.train[number] for number in range(3) for env in ("", "catch")]
    async with asyncio.timeout(60.0):
        groups = await collect_groups(
            *(context, tasks), group_size=2, temperature=1.0, seed=0, label="step 1"
        )
    assert [group.task for group in groups] == tasks
    assert context.facts() == {"name": "wordle", "beside": {"catch": {"name": "catch"}}}
    for (env, part), capacity in zip(parts.items(), capacities, strict=True):
        assert part.scorer.scored == 3 * [env]
        assert part.loop.most <= capacity
        assert [group.task.env for group in part.scorer.accepted] == 3 * [env]


async def test_an_environment_alone_plays_its_named_tasks():
    engine = TogetherEngine()
    part = mixed({env: context_of(composed(), env, 4, engine) for env in ("", "catch")}).parts[
        "catch"
    ]
    tasks = [part.splits.eval[0], part.splits.eval[1]]
    groups = await play_groups(part, tasks, group_size=1, temperature=1.0, seed=0, label="eval")
    assert [group.task.id for group in groups] == ["catch/eval/0", "catch/eval/1"]


# --- each environment by itself ------------------------------------------------------------------


def test_given_keys_take_part_in_the_interpolations_of_their_experiment():
    config = composed(
        "beside.catch.env.max_episode_tokens=72",
        "beside.catch.reward.terms.overlong={type: overlong, weight: 1.0, per_turn: false, "
        "limit_tokens: 40, buffer_share: 0.5}",
    ).beside["catch"]
    assert config.env.max_episode_tokens == 72
    assert config.reward.terms["overlong"].limit_tokens == 40
    with pytest.raises(ConfigError, match=r"beside\.other: no value for env\.tasks\.eval\.path"):
        composed("beside.other.conf=harbor")
    with pytest.raises(ConfigError, match="host=none with agent=loop"):
        paths = [f"beside.other.env.tasks.{split}.path={split}.csv" for split in ("train", "eval")]
        composed("beside.other.conf=harbor", *paths)


def test_another_experiment_takes_the_place_of_a_saved_one_and_keeps_its_weight():
    saved = composed("beside.catch.weight=3", "beside.catch.env.max_turns=5")
    changed = amend(saved, ["beside.catch.conf=echo"]).beside["catch"]
    new = compose(["conf=smoke", "beside.catch.conf=echo", "beside.catch.weight=3"]).config
    assert changed == new.beside["catch"]


async def test_an_environment_that_fails_completely_ends_the_run():
    class Broken(Runner):
        async def play(self, context, spec):
            episode = await super().play(context, spec)
            if spec.task.env:
                episode.status, episode.error = Status.ERROR, "it lacks a key"
            return episode

    config, engine = composed(), TogetherEngine()
    contexts = {env: context_of(config, env, 4, engine) for env in ("", "catch")}
    contexts["catch"] = replace(contexts["catch"], loop=Broken("catch", 4))
    context = mixed(contexts)
    tasks = [part.splits.train[0] for part in context.environments.values()]
    with pytest.raises(FailureError, match="all 2 episodes failed, the first with: it lacks a key"):
        await collect_groups(
            *(context, tasks), group_size=2, temperature=1.0, seed=0, label="step 1"
        )


def test_runs_of_several_environments_are_compared_environment_by_environment(tmp_path):
    def subject(*overrides):
        return SelectedModel(
            folder=SimpleNamespace(path=tmp_path),
            config=composed(*overrides),
            checkpoint=None,
            label="trained",
            step=1,
        )

    changes = ("beside.catch.eval.num_tasks=7", "beside.catch.env.success_reward=0.5")
    first, other = on_the_same_tasks([subject(), subject(*changes)])
    assert other.config.environments["catch"].eval == first.config.environments["catch"].eval
    assert other.config.beside == first.config.beside
    with pytest.raises(ConfigError, match="evaluate runs of the same environments"):
        on_the_same_tasks([subject(), subject("beside.echo.conf=echo")])


def test_changes_of_another_environments_code_are_found():
    before = {"beside": {"catch": {"env_code": "a", "shared_servers": 1}}}
    now = {"beside": {"catch": {"env_code": "b", "shared_servers": 2}}}
    assert [each.name for each in find_other_facts(before, now)] == ["beside.catch.env_code"]


def test_thresholds_are_about_the_first_environment(tmp_path):
    reports = {
        "trained": Interval(mean=0.9, low=0.8, high=1.0),
        "trained.catch": Interval(mean=0.1, low=0.0, high=0.2),
    }
    scored = {"num_tasks": 1, "tasks": [SimpleNamespace(successes=[True], rewards=[])]}
    rows = [
        Row(
            name=label,
            report=SimpleNamespace(label=label, success=found, reward=None, **scored),
            folder=tmp_path,
        )
        for label, found in reports.items()
    ]
    measured = measured_of(rows, 0.8)
    assert not has_failed(compare_with_thresholds(measured, {"success": 0.8}))
    (line,) = compare_with_thresholds(measured, {"success": 0.95})
    assert line.result is Result.FAIL


def test_fixed_ports_have_to_differ():
    config = composed("host.port=7000", "beside.catch.host.port=7000")
    with pytest.raises(ConfigError, match="several environments have the port 7000"):
        REQUIREMENTS["ports"](config)
