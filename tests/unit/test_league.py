"""A league of earlier policies: who joins, who plays which game, and what checkpoints have."""

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from fakes import InlineExecutor, local_engine, tiny_policy, trained_tensors

from openenv_pipe.config.schema import LeagueConfig
from openenv_pipe.pipeline.league import LEAGUE, League, load_leagues, save_leagues
from openenv_pipe.types import Task

ROLES = {"x": "policy", "o": "policy"}


def league_of(policy, *, env="", every=2, size=2, share=0.5, engine=None, executor=None):
    config = LeagueConfig(every=every, size=size, share=share)
    engine, executor = engine or local_engine(policy), executor or InlineExecutor()
    return League(config, env, 0, policy, engine, executor)


def moved(policy):
    """Change the policy's weights, as an update does."""
    with torch.no_grad():
        for values in trained_tensors(policy):
            values += 1.0


def grown(policy, **keys):
    """Return a league that a policy has joined whenever it could, after each of six updates."""
    league = league_of(policy, **keys)
    for version in range(1, 7):
        moved(policy)
        asyncio.run(league.join(version))
    return league


def games(count, env=""):
    task = Task(index=0, split="train", seed=0, id="0", reset={})
    return [(replace(task, env=env), ROLES) for _ in range(count)]


def members(engine) -> dict[str, list[torch.Tensor]]:
    frozen = engine.frozen
    return {name: [*map(torch.clone, trained_tensors(each))] for name, each in frozen.items()}


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_newest_members_stay_with_the_weights_that_they_had(lora_rank):
    policy = tiny_policy(lora_rank=lora_rank)
    start = [values.clone() for values in trained_tensors(policy)]
    engine = local_engine(policy)
    grown(policy, engine=engine)
    found = members(engine)
    assert [*found] == [" league 4", " league 6"]
    for version, weights in zip((4, 6), found.values(), strict=True):
        pairs = zip(weights, start, strict=True)
        assert all(torch.allclose(each, first + version) for each, first in pairs)


def test_without_members_the_policy_plays_itself():
    given = games(4)
    assert league_of(tiny_policy()).cast(1, given, "step 1") == given


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_member_plays_its_share_of_the_games_and_trained_players_take_turns(share):
    league = grown(tiny_policy(), share=share)
    opponents, trained = set(), Counter()
    for step in range(7, 17):
        of_step = [
            (task, roles)
            for task, roles in league.cast(step, games(8), f"step {step}")
            if task.labels
        ]
        assert len(of_step) == 8 * share
        assert len({task.labels["opponent"] for task, _ in of_step}) == 1
        opponents.add(of_step[0][0].labels["opponent"])
        for _, roles in of_step:
            (own,) = (player for player, role in roles.items() if role == "policy")
            trained[own] += 1
        again = league.cast(step, games(8), f"step {step}")
        assert [task for task, _ in again] == [
            task for task, _ in league.cast(step, games(8), f"step {step}")
        ]
    assert opponents == {"step_000004", "step_000006"}
    assert trained["x"] == trained["o"]


@pytest.mark.parametrize(("share", "count"), [(0.25, 3), (0.1, 1), (0.29, 100), (0.5, 1)])
def test_the_share_holds_over_steps_whatever_is_left_over_in_each(share, count):
    league = grown(tiny_policy(), share=share)
    num_cast = []
    for step in range(1, 401):
        cast = league.cast(step, games(count), f"step {step}")
        num_cast.append(sum("opponent" in task.labels for task, _ in cast))
        assert abs(num_cast[-1] - count * share) < 1.0
    assert sum(num_cast) / (400 * count) == pytest.approx(share, abs=0.08 / count)
    # The rounds of a step are drawn for by themselves, and those of an earlier league are equal.
    rounds = [league.cast(1, games(1), f"step 1 round {number}") for number in range(2, 30)]
    assert len({"opponent" in task.labels for ((task, _),) in rounds}) == 2
    again = grown(tiny_policy(), share=share)
    for number, found in enumerate(rounds, 2):
        ((task, _),) = again.cast(1, games(1), f"step 1 round {number}")
        assert task == found[0][0]


def test_a_copy_is_made_in_torchs_thread():
    policy, threads = tiny_policy(), []
    make = policy.twin

    def twin():
        threads.append(threading.current_thread().name)
        return make()

    policy.twin = twin
    with ThreadPoolExecutor(1, "torch") as executor:
        asyncio.run(league_of(policy, executor=executor).join(2))
    assert len(threads) == 1 and threads[0].startswith("torch")


def test_members_of_later_weights_leave_a_run_that_goes_back():
    policy = tiny_policy()
    engine = local_engine(policy)
    league = grown(policy, engine=engine)
    league.drop_after(5)
    assert [*members(engine)] == [" league 4"]
    assert {name.split("/")[1] for name in league.tensors()} == {"4"}
    asyncio.run(league.join(7))
    assert [*members(engine)] == [" league 4", " league 7"]


def test_games_of_other_environments_and_scripted_players_stay():
    league = grown(tiny_policy(), share=1.0)
    given = games(3, env="other")
    assert league.cast(7, given, "step 7") == given
    ((_, roles),) = league.cast(
        8, [(games(1)[0][0], {**ROLES, "z": "script", "u": "untrained"})], "step 8"
    )
    assert roles["z"] == "script"
    assert roles["x"] == "policy" and roles["o"] is roles["u"]


def test_a_checkpoint_has_all_leagues_and_a_folder_without_one_has_none(tmp_path):
    policy = tiny_policy()
    engine = local_engine(policy)
    leagues = [grown(policy, env=env, engine=engine) for env in ("", "other")]
    save_leagues(leagues, tmp_path)
    before = members(engine)

    fresh = tiny_policy()
    engine = local_engine(fresh)
    restored = [league_of(fresh, env=env, engine=engine) for env in ("", "other")]
    load_leagues(restored, tmp_path)
    after = members(engine)
    assert after.keys() == before.keys() and len(after) == 4
    for name, weights in after.items():
        pairs = zip(weights, before[name], strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    for step in (7, 8, 9):
        tasks = [
            [task for task, _ in each[0].cast(step, games(4), f"step {step}")]
            for each in (leagues, restored)
        ]
        assert tasks[0] == tasks[1]

    empty = league_of(fresh)
    (tmp_path / LEAGUE).unlink()
    load_leagues([empty], tmp_path)
    save_leagues([empty], tmp_path)
    assert not (tmp_path / LEAGUE).exists()
