"""Metrics of groups: entropy of all sampled tokens, why groups have no signal, unlike prompts."""

import math
from itertools import count

import pytest
from fakes import (
    FakeHost,
    all_episodes,
    collect,
    made_up_episode,
    made_up_group,
    made_up_turn,
    plain_sample,
    run_config,
    tiny_policy,
)

from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.learner.learner import Learner
from openenv_pipe.rollout.metrics import (
    count_unlike_prompts,
    summarise_groups,
    summarise_signal,
    summarise_skipped,
)
from openenv_pipe.types import IMAGE_IDS, Group


async def test_the_entropy_of_all_sampled_tokens_is_that_of_the_model():
    """The mean surprisal estimates the same number that the learner computes exactly."""
    policy = tiny_policy()
    groups = await collect(policy, num_tasks=16, group_size=8)
    learner = Learner(policy, run_config().trainer, max_episode_tokens=120, seed=0)
    exact = learner.update([plain_sample(each) for each in all_episodes(groups)], step=1)
    estimate = summarise_groups(groups)["sampling/entropy"]
    assert estimate == pytest.approx(exact["loss/entropy"], rel=0.02)


def test_the_entropy_is_there_although_nothing_is_trained():
    groups = [made_up_group([1.0, 1.0]), made_up_group([0.0, 0.0], failed=[0, 1])]
    assert summarise_groups(groups)["sampling/entropy"] == 1.0
    sure = made_up_episode(turns=[made_up_turn([5], [6, 7], logprobs=[0.0, math.nan])])
    group = Group(id="0", task=sure.task, episodes=[sure, sure])
    assert summarise_groups([group])["sampling/entropy"] == 0.0
    unknown = made_up_episode(turns=[made_up_turn([], [], reply="yes")])
    group = Group(id="0", task=unknown.task, episodes=[unknown])
    assert "sampling/entropy" not in summarise_groups([group])


def group_of(*replies, successes=(False, False)):
    """A group whose members write these token ids, in two turns each."""
    episodes = []
    for member, (ids, success) in enumerate(zip(replies, successes, strict=True)):
        turns = [made_up_turn([1], [9]), made_up_turn([2], list(ids))]
        episode = made_up_episode(member=member, turns=turns)
        episode.success = success
        episodes.append(episode)
    return Group(id="0", task=episodes[0].task, episodes=episodes)


def test_groups_without_a_signal_are_counted_by_their_reason():
    groups = [
        group_of([3, 4], [3, 4]),
        group_of([3, 4], [3, 5]),
        group_of([3, 4], [3], successes=(True, True)),
        group_of([3, 4], [3, 4], successes=(True, True)),
        group_of([3, 4], [4], successes=(True, False)),
        made_up_group([0.0, 0.0], failed=[1]),  # one is left: nothing to compare
    ]
    counts = {"skipped/identical": 2, "skipped/solved": 2, "skipped/unsolved": 2}
    assert summarise_skipped(groups) == counts


def test_replies_of_engines_without_token_ids_are_compared_as_text():
    turns = [[made_up_turn([], [], reply=reply)] for reply in ("yes", "yes", "no")]
    episodes = [made_up_episode(member=n, turns=each) for n, each in enumerate(turns)]
    same = Group(id="0", task=episodes[0].task, episodes=episodes[:2])
    others = Group(id="1", task=episodes[0].task, episodes=episodes[1:])
    assert summarise_skipped([same, others])["skipped/identical"] == 1


async def played(first_text):
    """Groups of an environment whose reset number n shows `first_text(n, seed)`."""
    numbers = count()

    def play(seed, number, action):
        text = first_text(next(numbers), seed) if number == 0 else f"turn {number}"
        return StepResult({"text": text}, 0.0, done=number == 2)

    policy = tiny_policy()
    groups = await collect(policy, host=FakeHost(play), num_tasks=3, group_size=4)
    return count_unlike_prompts(groups, policy.chat.reply_text)


async def test_an_environment_that_ignores_its_seed_is_noticed_by_its_first_prompts():
    assert await played(lambda reset, seed: f"Guess the number {seed}.") == 0
    assert await played(lambda reset, seed: f"Guess the number {reset}.") == 3
    assert await played(lambda reset, seed: f"Task {seed}{' again' * (reset == 5)}") == 1


@pytest.mark.parametrize(
    "volatile",
    [
        "id 1b4e28ba-2fa1-11d2-883f-0016d3cca4{:02x}",
        "session 9f86d081884c7d659a2feaa0c55ad0{:02x}",
        "started 2026-11-25T04:05:{:02d}.123Z",
        "it is 14:05:{:02d}",
    ],
)
async def test_ids_and_clocks_in_a_prompt_are_no_other_task(volatile):
    assert await played(lambda reset, seed: f"{volatile.format(reset)}: task {seed}") == 0
    assert await played(lambda reset, seed: f"{volatile.format(reset)}: task {reset}") == 3


def test_images_of_a_prompt_are_compared():
    def unlike(first, second):
        turns = [[made_up_turn(ids, [6])] for ids in (first, second)]
        episodes = [made_up_episode(member=n, turns=each) for n, each in enumerate(turns)]
        group = Group(id="0", task=episodes[0].task, episodes=episodes)
        return count_unlike_prompts([group], lambda ids: " ".join(map(str, ids)))

    assert unlike([5, IMAGE_IDS + 1], [5, IMAGE_IDS + 1]) == 0
    assert unlike([5, IMAGE_IDS + 1], [5, IMAGE_IDS + 2]) == 1


def test_an_episode_without_a_turn_is_compared_with_nothing():
    empty, full = made_up_episode(), made_up_episode(member=1)
    empty.turns = []
    group = Group(id="0", task=empty.task, episodes=[empty, full])
    assert count_unlike_prompts([group], str) == 0


def test_what_a_signal_costs_is_counted_per_episode_and_per_token():
    summary = {"episodes/count": 16, "tokens/sampled": 4000}
    assert summarise_signal(3, 4, summary) == {
        "groups/trained": 3,
        "groups/skipped": 1,
        "signal/per_episode": 3 / 16,
        "signal/per_1000_tokens": 0.75,
    }
    nothing = {"episodes/count": 0, "tokens/sampled": 0}
    assert summarise_signal(0, 0, nothing) == {"groups/trained": 0, "groups/skipped": 0}
