"""Games of several players: whose turn it is, what each sees and earns, and what ends a game."""

import random
import re
from dataclasses import replace

import pytest
from fakes import (
    FakeHost,
    all_episodes,
    local_engine,
    rollout_context,
    run_config,
    sampled,
    tiny_policy,
)

from openenv_pipe.algorithms.advantages import step_advantages
from openenv_pipe.engines.local import FrozenPolicy
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.errors import ConfigError, FailureError, SessionClosedError, StepRejectedError
from openenv_pipe.pipeline.components import build_roles
from openenv_pipe.pipeline.evaluate import evaluate_model
from openenv_pipe.rollout import collect_groups
from openenv_pipe.rollout.metrics import count_unlike_prompts, summarise_groups
from openenv_pipe.runs.episodes import read_episodes, write_episodes
from openenv_pipe.system.progress import EpisodeCount
from openenv_pipe.types import Status

ROLES = {"x": "policy", "o": "policy"}
NUM_MOVES = 5  # x has three of them
WINNER = {0: "x", 1: "o"}  # by the task's seed, modulo 2


def moves(seed: int, number: int, action: dict) -> StepResult:
    """Return a move of a game in which a text for one player names what the other has done."""
    player = "xo"[number % 2]
    winner, done = WINNER[seed % 2], number == NUM_MOVES
    earned = {name: 1.0 if name == winner else -1.0 for name in "xo"} if done else {"x": 0.25}
    text = "the end" if done else f"for {player} alone {number}"
    return StepResult({"text": text, "turn": player, "rewards": earned}, 9.0, done=done)


def always_a(observations, rng: random.Random) -> str:
    return "a"


def fails(observations, rng: random.Random) -> str:
    raise ValueError("no move is left")


def game_config(roles: dict[str, str] | None = None, **changes):
    players = {"roles": roles or ROLES, "turn": "turn", "rewards": "rewards", "league": None}
    return run_config(
        {
            "env.players": players,
            "env.baselines": {"fixed": f"{__name__}:always_a", "fails": f"{__name__}:fails"},
            "env.max_turns": 8,
            "env.success_reward": 1.0,
            "env.max_episode_tokens": 400,
            **changes,
        }
    )


def echoed(seed: int, number: int, action: dict) -> StepResult:
    """Return a move of a game in which each player is told the other's reply; o may begin."""
    result = moves(seed, number, action)
    last = action.get("text", "")
    player = "xo"[(number + seed) % 2]
    result.observation.update({"text": f"{player} after {last!r}", "turn": player})
    return result


def context_of(config, play=moves, order: random.Random | None = None, frozen=None):
    policy = tiny_policy()
    host = FakeHost(play, order=order)
    engine = local_engine(policy, frozen=frozen)
    context = rollout_context(config, host, chat=policy.chat, engine=engine)
    return replace(context, roles=build_roles(config, config.env.players.roles, context.engine))


async def games(
    config, play=moves, *, order: random.Random | None = None, group_size: int = 3, frozen=None
):
    context = context_of(config, play, order, frozen)
    if frozen:
        roles = {"x": "policy", "o": FrozenPolicy(context.engine, *frozen)}
        context = replace(context, roles=roles)
    tasks = [context.splits.train[index] for index in range(2)]
    return await collect_groups(
        context, tasks, group_size=group_size, temperature=1.0, seed=0, label="step 1"
    )


def texts(episode) -> list[str]:
    return [each["text"] for each in episode.observations]


async def test_each_player_has_a_group_of_its_own_for_each_task():
    groups = await games(game_config())
    assert [group.id for group in groups] == [
        f"step 1/{index}/{player}" for index in (0, 1) for player in "xo"
    ]
    assert [group.task.labels["player"] for group in groups] == ["x", "o"] * 2
    assert [[each.member for each in group.episodes] for group in groups] == [[0, 1, 2]] * 4
    seeds = [episode.seed for episode in all_episodes(groups)]
    assert len(set(seeds)) == len(seeds)


async def test_a_player_sees_what_came_for_it_and_never_the_words_of_the_other():
    x, o = (group.episodes[0] for group in (await games(game_config()))[:2])
    assert texts(x) == ["for x alone 0", "for x alone 2", "for x alone 4", "the end"]
    assert texts(o) == ["for o alone 1", "for o alone 3", "the end"]
    assert [turn.parent for turn in o.turns] == [-1, -1]  # each continues its own one before
    assert [episode.status for episode in (x, o)] == [Status.DONE] * 2


async def test_a_player_earns_its_own_rewards_also_those_of_the_others_moves():
    groups = await games(game_config())
    x, o = groups[0].episodes[0], groups[1].episodes[0]
    winner = WINNER[groups[0].task.seed % 2]
    last = {name: 1.0 if name == winner else -1.0 for name in "xo"}
    # The reset and four moves earn x 0.25 each, and that of the reset counts at its first step.
    assert [turn.reward for turn in x.turns] == [0.75, 0.5, last["x"]]
    assert [turn.reward for turn in o.turns] == [0.0, last["o"]]
    assert [x.success, o.success] == [last["x"] + 1.25 >= 1.0, last["o"] >= 1.0]


async def test_advantages_compare_a_player_with_itself_alone():
    def lucky(seed: int, number: int, action: dict) -> StepResult:
        result = moves(0, number, action)
        if number == NUM_MOVES:  # o always loses, and x wins by as much as its word says
            result.observation["rewards"] = {"x": len(action["text"]), "o": -5.0}
        return result

    x, o = step_advantages(
        (await games(game_config(), lucky))[:2], baseline="group", scale="none", discount=1.0
    )
    assert x.has_signal and not o.has_signal


async def test_the_order_in_which_environments_answer_changes_nothing():
    first = await games(game_config())
    again = await games(game_config(), order=random.Random(1))
    assert ids(first) == ids(again)


@pytest.mark.parametrize("other", ["fixed", "untrained"])
async def test_only_players_of_the_policy_are_trained_against_a_script_or_the_policy(other):
    groups = await games(game_config({"x": other, "o": "policy"}))
    assert [group.task.labels["player"] for group in groups] == ["o", "o"]
    assert len(groups[0].episodes[0].turns) == 2


def ids(groups) -> list:
    return [[turn.completion_ids for turn in each.turns] for each in all_episodes(groups)]


@pytest.mark.parametrize("group_size", [3, 40])  # more games than play at once
async def test_a_frozen_policy_plays_as_the_policy_would_with_its_weights(group_size):
    config = game_config({"x": "policy", "o": "untrained"})
    own = await games(config, echoed, group_size=group_size)
    same = await games(config, echoed, group_size=group_size, frozen={"same": tiny_policy()})
    earlier = {"earlier": tiny_policy(seed=1)}
    other = await games(config, echoed, group_size=group_size, frozen=earlier)
    assert ids(own) == ids(same) != ids(other)
    assert [group.task.labels["player"] for group in other] == ["x", "x"]
    order = random.Random(1)
    again = await games(config, echoed, group_size=group_size, frozen=earlier, order=order)
    assert sampled(again) == sampled(other)


async def test_the_limit_of_one_player_ends_the_game_for_all():
    groups = await games(game_config(**{"env.max_turns": 2}))
    assert {episode.status for episode in all_episodes(groups)} == {Status.TURN_LIMIT}
    assert [len(group.episodes[0].turns) for group in groups[:2]] == [2, 2]


async def test_a_lost_session_fails_the_episodes_of_all_players():
    def lost(seed: int, number: int, action: dict) -> StepResult:
        if seed % 2 == 0 and number == 3:
            raise SessionClosedError("connection lost")
        return moves(seed, number, action)

    groups = await games(game_config(), lost)
    failed = {group.id: all(each.failed for each in group.episodes) for group in groups}
    assert sorted(failed.values()) == [False, False, True, True]
    errors = {each.error for each in all_episodes(groups) if each.failed}
    assert errors == {"SessionClosedError: connection lost"}


async def test_a_rejected_move_is_told_to_its_player_who_stays_to_move():
    def strict(seed: int, number: int, action: dict) -> StepResult:
        if number == 1:
            raise StepRejectedError("VALIDATION_ERROR", "no such cell")
        return moves(seed, max(0, number - 1), action)

    x, o = (group.episodes[0] for group in (await games(game_config(), strict))[:2])
    assert x.turns[0].unusable and not x.turns[0].steps
    assert (len(x.turns), len(o.turns)) == (4, 2)


@pytest.mark.parametrize("roles", [{"x": "fixed", "o": "policy"}, ROLES])
async def test_games_that_end_before_a_players_first_turn_are_recorded(roles):
    def short(seed: int, number: int, action: dict) -> StepResult:
        return moves(seed, NUM_MOVES if number else 0, action)

    groups = await games(game_config(roles), short)
    own = [group for group in groups if group.task.labels["player"] == "o"]
    assert all(not episode.turns for episode in all_episodes(own))
    assert {episode.reward for episode in all_episodes(own)} == {0.0}


@pytest.mark.parametrize("roles", [{"x": "fixed", "o": "policy"}, ROLES])
async def test_games_that_are_over_at_their_reset_are_an_error(roles):
    def over(seed: int, number: int, action: dict) -> StepResult:
        return moves(seed, NUM_MOVES, action)

    with pytest.raises(FailureError, match="done at its reset"):
        await games(game_config(roles), over)


@pytest.mark.parametrize("roles", [{"x": "policy", "o": "fixed"}, {"x": "fixed", "o": "policy"}])
async def test_games_whose_first_messages_leave_no_room_are_an_error(roles):
    changes = {"env.max_episode_tokens": 8, "env.max_reply_tokens": 4}
    with pytest.raises(FailureError, match=r"raise env\.max_episode_tokens"):
        await games(game_config(roles, **changes))


async def test_an_episode_that_a_limit_ended_before_its_first_turn_is_no_success():
    def long_for_x(seed: int, number: int, action: dict) -> StepResult:
        result = moves(seed, number, action)
        if seed % 2 == 0 and number == 0:
            result.observation["text"] = "too long " * 400
        return result

    x, o, *others = await games(game_config(**{"env.success_reward": 0.0}), long_for_x)
    for episode in all_episodes([x, o]):
        assert (episode.status, episode.turns) == (Status.TOKEN_LIMIT, [])
        assert not episode.success
    assert any(episode.success for episode in all_episodes(others))


async def test_an_opponent_that_raises_ends_the_run_with_its_name():
    with pytest.raises(ConfigError, match=r"test_games:fails .*no move is left"):
        await games(game_config({"x": "fails", "o": "policy"}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("turn", "z"),
        ("turn", None),
        ("rewards", {"z": 1.0}),
        ("rewards", {"x": "much"}),
        ("rewards", 1.0),
        ("missing", None),
    ],
)
async def test_an_observation_without_what_the_players_need_is_named(key, value):
    def wrong(seed: int, number: int, action: dict) -> StepResult:
        result = moves(seed, number, action)
        result.observation[key] = value
        if key == "missing":
            del result.observation["rewards"]
        return result

    config = game_config()
    field = "rewards" if key == "missing" else key
    with pytest.raises(Exception, match=re.escape(f"env.players.{field}={field}")) as caught:
        await games(config, wrong)
    assert "x, o (env.players.roles)" in str(caught.value)


async def test_metrics_are_also_by_player(tmp_path):
    groups = await games(game_config())
    metrics = summarise_groups(groups)
    assert metrics["episodes/count"] == 12
    for player in "xo":
        own = [each for each in all_episodes(groups) if each.task.labels["player"] == player]
        assert metrics[f"player/{player}/reward"] == sum(each.reward for each in own) / len(own)
        assert f"player/{player}/success" in metrics
    assert count_unlike_prompts(groups, str) == 0
    path = tmp_path / "episodes" / "step_000001.jsonl.gz"
    path.parent.mkdir()
    write_episodes(path, groups)
    assert [group.task.labels for group in read_episodes(path)] == [g.task.labels for g in groups]


@pytest.mark.parametrize("opponent", [None, "fixed"])
async def test_an_evaluation_plays_each_trained_player_against_the_others(opponent):
    config = game_config(
        **{"eval.opponent": opponent, "eval.num_tasks": 4, "eval.samples_per_task": 2}
    )
    count = EpisodeCount()
    (evaluation,) = await evaluate_model(config, context_of(config), "trained", 1, count)
    assert (count.finished, count.total) == (8, 8)
    report = evaluation.report
    assert report.num_tasks == 4
    assert report.samples_per_task == 2
    assert {name: each.num_tasks for name, each in report.by_label["player"].items()} == {
        "x": 2,
        "o": 2,
    }
