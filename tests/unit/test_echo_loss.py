"""ECHO: the cross entropy of the environment's own tokens beside the policy's loss."""

import copy
import dataclasses
import random

import pytest
import torch
from fakes import (
    DROPS_THOUGHTS,
    assert_same_update,
    loss_and_gradients,
    made_up_episode,
    made_up_turn,
    random_sample,
    random_samples,
    run_config,
    tiny_model,
    tiny_policy,
)

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.algorithms.samples import episode_samples
from openenv_pipe.errors import ConfigError
from openenv_pipe.learner.learner import Learner
from openenv_pipe.models.load import load_chat, reject_rerendered
from openenv_pipe.pipeline.grpo_stage import samples_of_step
from openenv_pipe.types import Finish

SAMPLES = random_samples(0)
COEF = 0.3


def by_hand(policy, samples, temperature):
    """The mean cross entropy of the environment's tokens, and its gradients, row by row."""
    model = copy.deepcopy(policy.model)
    found = []
    for sample in samples:
        ids = torch.tensor([sample.token_ids])
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / temperature, dim=-1)
        first = sample.loss_mask.index(True)  # what is before is the first prompt
        for index in range(first, len(sample.token_ids)):
            if not sample.loss_mask[index]:
                found.append(-logprobs[index - 1, sample.token_ids[index]])
    loss = torch.stack(found).mean()
    loss.backward()
    return loss.item(), len(found), [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("tokens_per_batch", [16, 8192])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_loss_and_its_gradient_are_the_reference_written_by_hand(lora_rank, tokens_per_batch):
    policy = tiny_policy(lora_rank=lora_rank)
    changes = {"temperature": 0.7, "tokens_per_batch": tokens_per_batch}
    plain = loss_and_gradients(policy, SAMPLES, changes)
    both = loss_and_gradients(policy, SAMPLES, changes | {"loss.echo_coef": COEF})
    loss, _, gradients = by_hand(policy, SAMPLES, 0.7)
    expected = [one + COEF * other for one, other in zip(plain[1], gradients, strict=True)]
    assert_same_update(both, (plain[0] + COEF * loss, expected))
    assert max(each.abs().max() for each in gradients) > 1e-3


def test_its_tokens_have_a_count_and_a_mean_of_their_own():
    policy = tiny_policy()
    trainer = run_config({"trainer.loss.echo_coef": COEF, "trainer.passes_per_step": 2}).trainer
    learner = Learner(policy, trainer, max_episode_tokens=120, seed=0)
    _, num_tokens, _ = by_hand(policy, SAMPLES, 1.0)
    metrics = learner.update(SAMPLES, 1)
    assert metrics["tokens/echo"] == num_tokens
    assert metrics["tokens/trained"] == sum(sum(sample.loss_mask) for sample in SAMPLES)
    assert (
        metrics["loss/echo"] < by_hand(tiny_policy(), SAMPLES, 1.0)[0]
    )  # the second pass has less


def test_a_policy_learns_to_foresee_the_environment_without_any_reward():
    samples = random_samples(0)
    for sample in samples:
        sample.advantages = [0.0] * len(sample.advantages)
    changes = {"trainer.loss.echo_coef": 1.0, "trainer.optimizer.lr": 1e-2}
    learner = Learner(tiny_policy(), run_config(changes).trainer, max_episode_tokens=120, seed=0)
    found = [learner.update(samples, step)["loss/echo"] for step in range(1, 9)]
    assert found[-1] < found[0] / 2


def test_without_it_the_batch_has_no_such_tokens():
    plain, changed = pack(SAMPLES, share=True), pack(SAMPLES, share=True, environment=True)
    assert plain.environment_places is None
    num_tokens = sum(sum(sample.environment_mask) for sample in SAMPLES)
    assert len(changed.environment_places) == num_tokens
    assert len(plain.predictors) < len(changed.predictors)
    for name in ("token_ids", "positions", "logprobs", "advantages", "episode_tokens"):
        assert torch.equal(getattr(plain, name), getattr(changed, name))
    same = changed.predictors[changed.places], changed.targets[changed.places]
    assert torch.equal(plain.predictors[plain.places], same[0])
    assert torch.equal(plain.targets[plain.places], same[1])


def test_the_end_of_a_reply_that_was_cut_off_is_not_the_environments():
    """The template writes it in the model's place."""
    turns = [
        made_up_turn([5, 6], [7, 8], finish=Finish.LENGTH),
        made_up_turn([9, 10, 11], [12]),
        made_up_turn([13, 14], [15]),
    ]
    (sample,) = episode_samples("0", made_up_episode(turns=turns), [1.0] * 3)
    pairs = zip(sample.token_ids, sample.environment_mask, strict=True)
    assert [token for token, has in pairs if has] == [10, 11, 13, 14]


def test_each_token_counts_once_however_many_branches_it_is_in():
    """Turns 1 and 2 both continue turn 0, and turn 2 is continued by turn 3."""
    turns = [
        made_up_turn([5, 6], [7, 8]),
        dataclasses.replace(made_up_turn([9], [10]), parent=0),
        dataclasses.replace(made_up_turn([11, 12], [13]), parent=0),
        dataclasses.replace(made_up_turn([14], [15]), parent=2),
    ]
    samples = episode_samples("0", made_up_episode(turns=turns), [1.0] * 4)
    seen = [
        [token for token, has in zip(each.token_ids, each.environment_mask, strict=True) if has]
        for each in samples
    ]
    assert seen == [[9], [11, 12, 14]]


def test_single_turns_have_no_such_tokens():
    samples = [random_sample(random.Random(number), [(3, 4)]) for number in range(3)]
    policy = tiny_policy()
    plain = loss_and_gradients(policy, samples)
    assert_same_update(loss_and_gradients(policy, samples, {"loss.echo_coef": COEF}), plain)


def test_groups_without_a_signal_are_trained_on():
    loss = run_config({"trainer.loss.echo_coef": COEF}).trainer.loss
    assert not loss.needs_only_advantages
    assert samples_of_step([], loss)[0] == []


def test_a_template_that_renders_each_prompt_anew_is_rejected():
    model = tiny_model().model_copy(update={"chat_template": DROPS_THOUGHTS, "history": "rerender"})
    config = run_config({"trainer.loss.echo_coef": COEF}).model_copy(update={"model": model})
    with pytest.raises(ConfigError, match=r"trainer\.loss\.echo_coef=0\.3 with .*rerender"):
        reject_rerendered(config, load_chat(model))
    reject_rerendered(config, tiny_policy().chat)
    kl = {"trainer.loss.kl.coef": 1.0, "trainer.loss.kl.hint": "feedback"}
    config = run_config(kl).model_copy(update={"model": model})
    with pytest.raises(ConfigError, match=r"kl\.hint=feedback with .*; set .*hint=null"):
        reject_rerendered(config, load_chat(model))
