"""Self-distillation: the policy with a hint in its prompt is the teacher of its own replies."""

import copy
import dataclasses
import json
import random

import pytest
import torch
from fakes import (
    assert_same_update,
    loss_and_gradients,
    made_up_episode,
    made_up_turn,
    random_samples,
    tiny_policy,
)

from openenv_pipe.algorithms.samples import episode_samples
from openenv_pipe.pipeline.hints import BEFORE, add_hints
from openenv_pipe.types import Group, Step, Task

CHANGES = {
    "temperature": 0.7,
    "loss.policy_coef": 0.0,
    "loss.normalise": "token",
    "loss.kl.coef": 0.3,
    "loss.kl.hint": "feedback",
    "loss.kl.estimator": "k2",
    "loss.kl.importance_weights": False,
}
TASK = Task(id="train/1", split="train", index=1, seed=1)


def with_hint(sample, ids):
    """Return a sample with more tokens before its own."""
    none = [False] * len(ids)
    return dataclasses.replace(
        sample,
        token_ids=ids + sample.token_ids,
        loss_mask=none + sample.loss_mask,
        environment_mask=none + sample.environment_mask,
        logprobs=[0.0] * len(ids) + sample.logprobs,
        advantages=[0.0] * len(ids) + sample.advantages,
    )


def some_hinted(seed):
    """Samples of which all but the first have hints of their own."""
    draw, samples = random.Random(seed), random_samples(seed)
    for sample in samples[1:]:
        ids = [draw.randrange(5, 250) for _ in range(draw.randrange(1, 9))]
        sample.hinted = with_hint(sample, ids)
    return samples


def logprobs_of(model, sample):
    ids = torch.tensor([sample.token_ids])
    logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / 0.7, dim=-1)
    chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
    return chosen[torch.tensor(sample.loss_mask[1:])]


@pytest.mark.parametrize("tokens_per_batch", [16, 8192])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_loss_and_its_gradient_are_the_reference_written_by_hand(lora_rank, tokens_per_batch):
    policy, samples = tiny_policy(lora_rank=lora_rank), some_hinted(0)
    seen = loss_and_gradients(policy, samples, CHANGES | {"tokens_per_batch": tokens_per_batch})
    model = copy.deepcopy(policy.model)
    found = []
    for sample in samples:
        with torch.no_grad():
            theirs = logprobs_of(model, sample.hinted or sample)
        found.append((logprobs_of(model, sample) - theirs) ** 2 / 2)
    loss = 0.3 * torch.cat(found).mean()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert_same_update(seen, (loss.item(), gradients))
    assert not found[0].any() and all(each.any() for each in found[1:])
    assert max(each.abs().max() for each in gradients) > 1e-5


def test_the_teacher_is_the_policy_itself_and_not_a_copy():
    policy = tiny_policy()
    loss_and_gradients(policy, some_hinted(0), CHANGES)
    assert policy.reference is None and not policy.teachers


@pytest.fixture(scope="module")
def chat():
    return tiny_policy().chat


def played(chat, rewards, *, tools=()):
    """A group of two turns each, the samples of which have the first messages of a chat."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "begin"}]
    prompt = chat.first_ids(messages, list(tools))
    described = [{"role": "tools", "content": json.dumps(tools)}] if tools else []
    episodes = []
    for member, reward in enumerate(rewards):
        turns = [
            made_up_turn(prompt, chat.encode(f"go {member}")),
            made_up_turn(chat.encode("well?"), chat.encode("end")),
        ]
        turns[0].messages = [*described, *messages]
        turns[1].steps = [Step(action={}, observation={"verdict": f"no {member}"})]
        episodes.append(made_up_episode(reward, member=member, turns=turns))
    samples = [sample for each in episodes for sample in episode_samples("0", each, [1.0, 1.0])]
    return samples, Group(id="0", task=TASK, episodes=episodes), messages


@pytest.mark.parametrize("tools", [(), ({"name": "f", "description": "", "parameters": {}},)])
def test_what_is_shown_stands_at_the_end_of_the_first_messages(chat, tools):
    tools = tuple({"type": "function", "function": each} for each in tools)
    samples, group, (system, user) = played(chat, [0.5, 1.0, 0.5], tools=tools)
    add_hints(samples, [group], "demonstration", chat, 1000)
    shown = {**user, "content": user["content"] + BEFORE["demonstration"] + "go 1well?end"}
    prompt = chat.first_ids([system, shown], list(tools))
    assert samples[1].hinted is None, "the best one itself"
    for sample in (samples[0], samples[2]):
        behind = sample.token_ids[sample.loss_mask.index(True) :]
        hinted = sample.hinted
        assert hinted.token_ids == prompt + behind
        assert [t for t, m in zip(hinted.token_ids, hinted.loss_mask, strict=True) if m] == [
            t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m
        ]
        assert hinted.num_episode_tokens == sample.num_episode_tokens


def test_feedback_is_what_the_environment_returned_last(chat):
    samples, group, (system, user) = played(chat, [0.5, 1.0])
    add_hints(samples, [group], "feedback", chat, 1000)
    for number, sample in enumerate(samples):
        text = f'{BEFORE["feedback"]}{{"verdict": "no {number}"}}'
        prompt = chat.first_ids([system, {**user, "content": user["content"] + text}])
        assert sample.hinted.token_ids[: len(prompt)] == prompt


def test_feedback_is_why_the_last_reply_could_not_be_used(chat):
    samples, group, (system, user) = played(chat, [0.5, 1.0])
    group.episodes[0].turns[1].unusable = "no word"
    add_hints(samples, [group], "feedback", chat, 1000)
    shown = {**user, "content": f"{user['content']}{BEFORE['feedback']}no word"}
    prompt = chat.first_ids([system, shown])
    assert samples[0].hinted.token_ids[: len(prompt)] == prompt


def test_a_hint_is_cut_to_the_room_that_there_is(chat):
    samples, group, _ = played(chat, [0.5, 1.0])
    length = len(samples[0].token_ids)
    for max_tokens, has_room in ((length + 40, False), (length + 70, True)):
        samples[0].hinted = None
        add_hints(samples, [group], "demonstration", chat, max_tokens)
        assert (samples[0].hinted is not None) is has_room
        if has_room:
            assert length < len(samples[0].hinted.token_ids) <= max_tokens


def test_the_words_of_others_form_no_control_token_in_a_hint(chat):
    samples, group, _ = played(chat, [0.5, 1.0])
    group.episodes[0].turns[1].steps[0].observation["verdict"] = "<|assistant|>"
    add_hints(samples, [group], "feedback", chat, 1000)
    marker = chat.tokenizer.convert_tokens_to_ids("<|assistant|>")
    for sample in (samples[0], samples[0].hinted):
        assert sample.token_ids.count(marker) == 1
