"""The replay of the best: cross entropy on good earlier episodes beside the policy's loss."""

import copy
import dataclasses

import pytest
import torch
from fakes import (
    GradientKeeper,
    assert_same_update,
    made_up_episode,
    made_up_turn,
    random_samples,
    tiny_policy,
    trainer_config,
)

from openenv_pipe.algorithms.advantages import step_advantages
from openenv_pipe.algorithms.losses.normalization import Uncomputed
from openenv_pipe.config.schema import ReplayConfig
from openenv_pipe.learner.learner import Learner
from openenv_pipe.pipeline.grpo_stage import samples_of_step
from openenv_pipe.pipeline.replay import Replay
from openenv_pipe.types import Group, Task

SAMPLES, EARLIER = random_samples(0), random_samples(1, count=4)
COEF = 0.3


def config(**changes):
    values = {"coef": COEF, "size": 8, "min_reward": None, "per_step": 4} | changes
    return ReplayConfig.model_validate(values)


def learner_of(policy, **changes):
    values = {"replay": config().model_dump(), "temperature": 0.7} | changes
    return Learner(policy, trainer_config(values), max_episode_tokens=120, seed=0)


def updates_of(policy, replayed, **changes):
    """Return the metrics of a step and the gradients of its updates, which change no weight."""
    learner = learner_of(policy, **changes)
    learner.optimizer = keeper = GradientKeeper(policy)
    return learner.update(SAMPLES, 1, Uncomputed(), replayed), keeper.updates


def by_hand(policy, samples):
    """The mean cross entropy of the agent's tokens, and its gradients, row by row."""
    model = copy.deepcopy(policy.model)
    found = []
    for sample in samples:
        ids = torch.tensor([sample.token_ids])
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / 0.7, dim=-1)
        found += [
            -logprobs[index - 1, sample.token_ids[index]]
            for index, chosen in enumerate(sample.loss_mask)
            if chosen
        ]
    loss = torch.stack(found).mean()
    loss.backward()
    return loss.item(), len(found), [p.grad for p in model.parameters() if p.requires_grad]


def kept(replay):
    """Return the task and the first sampled token of all episodes that a replay keeps."""
    return sorted((sample.group, sample.token_ids[-1]) for sample in replay.samples(1))


def advantages_of(groups, **options):
    settings = {"baseline": "group", "scale": "group", "discount": 1.0} | options
    return step_advantages(groups, **settings)


def group(id, task, rewards, **of_task):
    """Return a group whose episodes end with their rewards times ten as their only token."""
    task = Task(id=f"train/{task}", split="train", index=task, seed=task, **of_task)
    episodes = [
        dataclasses.replace(
            made_up_episode(reward, member=member, turns=[made_up_turn([5], [int(10 * reward)])]),
            task=task,
        )
        for member, reward in enumerate(rewards)
    ]
    return Group(id=id, task=task, episodes=episodes)


@pytest.mark.parametrize("tokens_per_batch", [16, 8192])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_loss_and_its_gradient_are_the_reference_written_by_hand(lora_rank, tokens_per_batch):
    policy = tiny_policy(lora_rank=lora_rank)
    plain, (before,) = updates_of(policy, (), tokens_per_batch=tokens_per_batch)
    both, (after,) = updates_of(policy, EARLIER, tokens_per_batch=tokens_per_batch)
    loss, num_tokens, gradients = by_hand(policy, EARLIER)
    expected = [one + COEF * other for one, other in zip(before, gradients, strict=True)]
    assert_same_update((both["loss/total"], after), (plain["loss/total"] + COEF * loss, expected))
    assert max(each.abs().max() for each in gradients) > 1e-3
    assert both["loss/replay"] == pytest.approx(loss, rel=1e-5)
    assert both["tokens/replay"] == num_tokens
    assert both["tokens/computed"] > plain["tokens/computed"]
    for name in ("loss/policy", "loss/entropy", "tokens/trained", "advantage/std", "ratio/max"):
        assert both[name] == plain[name]
    assert "loss/replay" not in plain and "tokens/replay" not in plain


def test_updates_and_passes_share_the_episodes_out():
    policy = tiny_policy()
    metrics, updates = updates_of(policy, EARLIER, updates_per_step=2, passes_per_step=2)
    _, plain = updates_of(policy, (), updates_per_step=2, passes_per_step=2)
    parts = [by_hand(policy, EARLIER[number::2]) for number in (0, 1, 0, 1)]
    for after, before, (_, _, gradients) in zip(updates, plain, parts, strict=True):
        expected = [one + COEF * other for one, other in zip(before, gradients, strict=True)]
        assert_same_update((0.0, after), (0.0, expected))
    assert metrics["tokens/replay"] == by_hand(policy, EARLIER)[1]


def test_the_policy_learns_the_replayed_replies():
    learner = learner_of(tiny_policy(), **{"loss.policy_coef": 0.0, "optimizer.lr": 1e-2})
    found = [learner.update(SAMPLES, step, Uncomputed(), EARLIER) for step in range(1, 9)]
    assert found[-1]["loss/replay"] < found[0]["loss/replay"] / 2


def test_the_best_episode_of_each_task_is_kept():
    replay = Replay(config(), 0)
    replay.add(advantages_of([group("a", 1, [0.1, 0.4, 0.2]), group("b", 2, [0.0, 0.3])]))
    assert kept(replay) == [("a", 4), ("b", 3)]
    replay.add(advantages_of([group("c", 1, [0.3, 0.1]), group("d", 2, [0.2, 0.9])]))
    assert kept(replay) == [("a", 4), ("d", 9)]
    replay.add(advantages_of([group("e", 1, [0.4, 0.1]), group("f", 3, [0.7, 0.7])]))
    assert kept(replay) == [("a", 4), ("d", 9)], "neither better than before, nor than the mean"


def test_a_least_reward_takes_the_place_of_the_groups_mean():
    replay = Replay(config(min_reward=0.5), 0)
    replay.add(advantages_of([group("a", 1, [0.1, 0.4]), group("b", 2, [0.7, 0.7])]))
    assert kept(replay) == [("b", 7)]


def test_the_lowest_and_oldest_give_way_to_a_new_task():
    replay = Replay(config(size=2, min_reward=0.1), 0)
    for number, reward in enumerate([0.3, 0.2, 0.3, 0.1]):
        replay.add(advantages_of([group(f"{number}", number, [reward, 0.0])]))
    assert kept(replay) == [("0", 3), ("2", 3)]
    replay.add(advantages_of([group("4", 4, [0.3, 0.0])]))
    assert kept(replay) == [("2", 3), ("4", 3)]


def test_each_player_of_a_task_has_an_episode_of_its_own(tmp_path):
    replay = Replay(config(), 0)
    seller, buyer = ({"labels": {"player": name}} for name in ("seller", "buyer"))
    groups = [group("a", 1, [0.9, 0.1], **seller), group("b", 1, [0.5, 0.1], **buyer)]
    replay.add(advantages_of(groups))
    replay.save(tmp_path)
    again = Replay(config(), 0)
    again.load(tmp_path)
    assert kept(again) == kept(replay) == [("a", 9), ("b", 5)]


def test_an_environment_with_lower_rewards_keeps_its_share():
    replay = Replay(config(size=4), 0)
    for number in range(4):
        low = group(f"low {number}", number, [0.4, 0.0])
        high = group(f"high {number}", number, [0.9, 0.0], env="other")
        replay.add(advantages_of([low, high]))
    assert [name.split()[0] for name, _ in kept(replay)] == ["high", "high", "low", "low"]


def test_a_masked_episode_is_not_kept():
    (each,) = advantages_of([group("a", 1, [0.1, 0.9, 0.5])])
    replay = Replay(config(min_reward=0.0), 0)
    replay.add([dataclasses.replace(each, masked=frozenset([1]))])
    assert kept(replay) == [("a", 5)]


def test_what_is_drawn_depends_on_step_and_seed_alone_and_outlives_a_checkpoint(tmp_path):
    replay = Replay(config(per_step=2), 0)
    replay.add(advantages_of([group(f"{n}", n, [n / 10, 0.0]) for n in range(1, 7)]))
    again = Replay(config(per_step=2), 0)
    replay.save(tmp_path)
    again.load(tmp_path)
    drawn = [replay.samples(step) for step in range(1, 9)]
    assert drawn == [again.samples(step) for step in range(1, 9)]
    assert len({tuple(sample.group for sample in each) for each in drawn}) > 3
    assert all(len(each) == 2 for each in drawn)
    first = (tmp_path / "replay.jsonl.gz").read_bytes()
    again.save(tmp_path)
    assert (tmp_path / "replay.jsonl.gz").read_bytes() == first


def test_a_fork_with_a_higher_threshold_or_less_room_keeps_the_rest(tmp_path):
    replay = Replay(config(), 0)
    replay.add(advantages_of([group(f"{n}", n, [n / 10, 0.0]) for n in (1, 2, 3)]))
    replay.save(tmp_path)
    for changes, left in (({"min_reward": 0.3}, ["3"]), ({"size": 2}, ["2", "3"])):
        forked = Replay(config(**changes), 0)
        forked.load(tmp_path)
        assert [id for id, _ in kept(forked)] == left
    off = Replay(None, 0)
    off.load(tmp_path)
    assert off.samples(1) == []


def test_a_step_without_a_signal_still_replays():
    loss = trainer_config().loss
    advantages = advantages_of([group("a", 1, [0.5, 0.5])])
    assert samples_of_step(advantages, loss)[0] == []
    samples, uncomputed = samples_of_step(advantages, loss, is_replaying=True)
    assert [sample.advantages for sample in samples] == [[0.0, 0.0]] * 2
    assert uncomputed == Uncomputed()
    mixed = [*advantages, *advantages_of([group("b", 2, [0.5, 0.1])])]
    samples, uncomputed = samples_of_step(mixed, loss, is_replaying=True)
    assert {sample.group for sample in samples} == {"b"}
    assert uncomputed.num_episodes == 2
