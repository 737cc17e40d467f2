"""The policy: its logprobs, its reference and its adapter. Trap numbers: tests/README.md."""

import pytest
import torch
from fakes import (
    CPU,
    kl_term,
    random_samples,
    tiny_model,
    tiny_policy,
    trained_tensors,
    trainer_config,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.errors import ConfigError
from openenv_pipe.learner.learner import Learner
from openenv_pipe.learner.supervised import with_dropout
from openenv_pipe.models.load import load_policy

SAMPLES = random_samples(0)
BATCH = pack(SAMPLES, share=False)


def logits_of(policy):
    with torch.no_grad():
        return policy.logits(policy.hidden(BATCH.token_ids[None]))


def logprobs_of(policy, temperature=1.0):
    with torch.no_grad():
        return policy.logprobs(BATCH, temperature)[0]


def learner_of(policy, **changes):
    return Learner(policy, trainer_config(changes), max_episode_tokens=120, seed=0)


def change(policy):
    generator = torch.Generator().manual_seed(1)
    for parameter in trained_tensors(policy):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_logprobs_and_entropies_are_those_of_the_model(lora_rank, temperature):
    """Traps 4 and 7: logprobs are selected by token id, at the temperature, from the model's
    logits."""
    policy = tiny_policy(lora_rank=lora_rank)
    change(policy)
    with torch.no_grad():
        rows = [
            policy.model(input_ids=torch.tensor([sample.token_ids])).logits[0, :-1]
            for sample in SAMPLES
        ]
        logprobs, entropies = policy.logprobs(BATCH, temperature)
    mask = torch.tensor([chosen for sample in SAMPLES for chosen in sample.loss_mask[1:]])
    ids = torch.tensor([token for sample in SAMPLES for token in sample.token_ids[1:]])[mask]
    expected = torch.log_softmax(torch.cat(rows) / temperature, dim=-1)[mask]
    assert torch.allclose(logprobs, expected.gather(1, ids[:, None])[:, 0], atol=1e-5)
    by_torch = torch.distributions.Categorical(logits=expected).entropy()
    assert torch.allclose(entropies, by_torch, atol=1e-5)
    assert not entropies.requires_grad


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_bfloat16_is_near_float32(lora_rank):
    """The CPU's own attention for bfloat16 is causal too, and gives nearly the same gradients."""
    gradients = []
    for autocast in ("bfloat16", "float32"):
        policy = tiny_policy(lora_rank=lora_rank, autocast=autocast)
        change(policy)
        logprobs, _ = policy.logprobs(BATCH, 1.0)
        assert logprobs.dtype == torch.float32
        logprobs.mean().backward()
        flat = [parameter.grad.flatten() for parameter in trained_tensors(policy)]
        gradients.append((logprobs.detach(), torch.cat(flat)))
    (rounded, rounded_gradient), (exact, exact_gradient) = gradients
    assert (rounded - exact).abs().max() < 0.3
    assert torch.cosine_similarity(rounded_gradient, exact_gradient, dim=0) > 0.99


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_reference_stays_what_the_policy_was(lora_rank):
    """Full training copies the reference; with an adapter, switching off the adapter gives it."""
    policy = tiny_policy(lora_rank=lora_rank)
    before = logprobs_of(policy, 0.7)
    num_parameters = policy.num_parameters
    policy.keep_reference()
    assert torch.equal(policy.reference_logprobs(BATCH, 0.7), before)
    change(policy)
    assert torch.equal(policy.reference_logprobs(BATCH, 0.7), before)
    assert not torch.allclose(logprobs_of(policy, 0.7), before, atol=1e-2)
    assert policy.num_parameters == num_parameters
    kept = sum(tensor.numel() for tensor in policy.reference)
    assert kept == (0 if lora_rank else num_parameters)


def test_the_reference_of_an_adapter_is_the_policy_after_its_warm_start():
    policy = tiny_policy(lora_rank=2)
    change(policy)
    warmed = logprobs_of(policy, 1.0)
    policy.keep_reference()
    change(policy)
    assert torch.equal(policy.reference_logprobs(BATCH, 1.0), warmed)
    kept = sum(tensor.numel() for tensor in policy.reference)
    assert kept == sum(parameter.numel() for _, parameter in policy.trained_parameters())


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_training_does_not_move_the_reference(lora_rank):
    policy = tiny_policy(lora_rank=lora_rank)
    learner = learner_of(policy, **{"loss.kl.coef": 0.1, "optimizer.lr": 1e-2})
    before = policy.reference_logprobs(BATCH, 1.0)
    kls = [learner.update(random_samples(0), step)["loss/kl"] for step in range(1, 5)]
    assert torch.equal(policy.reference_logprobs(BATCH, 1.0), before)
    assert kls[0] == pytest.approx(0.0, abs=1e-6)
    assert kls[-1] > 1e-4


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("num_updates", [1, 3])
def test_the_reference_follows_the_policy_every_few_steps(lora_rank, num_updates):
    """Steps 3 and 8 have no samples, and a new learner goes on after step 5, as a resume does."""
    policy = tiny_policy(lora_rank=lora_rank)
    changes = {"loss.kl.coef": 0.1, "loss.kl.refresh_every": 2}
    changes |= {"optimizer.lr": 1e-2, "updates_per_step": num_updates}
    learner = learner_of(policy, **changes)
    after, seen = {0: logprobs_of(policy)}, {}
    for step in range(1, 11):
        if step not in (3, 8):
            learner.update(random_samples(0), step)
            seen[step] = policy.reference_logprobs(BATCH, 1.0)
        after[step] = logprobs_of(policy)
        if step == 5:
            reference, taken = policy.reference, learner.optimizer.num_steps_taken
            learner = learner_of(policy, **changes)
            policy.keep_reference(reference)
            learner.optimizer.num_steps_taken = taken
    of_step = {1: 0, 2: 0, 4: 2, 5: 4, 6: 4, 7: 6, 9: 8, 10: 8}
    assert all(torch.equal(seen[step], after[of]) for step, of in of_step.items())
    assert len({values.sum().item() for values in seen.values()}) == len(set(of_step.values()))


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_pull_of_the_reference_is_towards_it(lora_rank):
    """The gradient of the KL term alone moves the policy back towards the reference."""
    policy = tiny_policy(lora_rank=lora_rank)
    # the samples are made up, so they need no importance weights
    learner = learner_of(policy, **{"loss.kl": kl_term(1.0), "optimizer.lr": 1e-2})
    change(policy)
    samples = random_samples(0)
    for sample in samples:
        sample.advantages = [0.0] * len(sample.advantages)
    kls = [learner.update(samples, step)["loss/kl"] for step in range(1, 8)]
    assert kls[-1] < kls[0] / 2


def test_without_kl_no_reference_is_kept():
    policy = tiny_policy()
    learner_of(policy)
    assert policy._reference is None


def test_an_adapter_trains_little_and_changes_the_logprobs():
    """Trap 17: without the adapter the logprobs would not change."""
    policy = tiny_policy(lora_rank=2)
    before = logits_of(policy)
    assert torch.equal(before, logits_of(tiny_policy()))  # a new adapter changes nothing
    names = [name for name, _ in policy.trained_parameters()]
    assert names
    assert all("lora_" in name for name in names)
    change(policy)
    assert (logits_of(policy) - before).abs().max() > 1e-2


def test_all_weights_are_trained_without_an_adapter():
    policy = tiny_policy()
    assert len(policy.trained_parameters()) == len(list(policy.model.parameters()))


def test_weights_follow_from_the_seed():
    one, same, other = (tiny_policy(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(logits_of(one), logits_of(same))
    assert not torch.equal(logits_of(one), logits_of(other))


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_dropout_acts_while_learning_only(lora_rank):
    policy = load_policy(tiny_model(lora_rank=lora_rank, dropout=0.5), seed=0, device=CPU)
    change(policy)
    assert torch.equal(logits_of(policy), logits_of(policy))
    with with_dropout(policy):
        assert torch.equal(logits_of(policy), logits_of(policy)) == (lora_rank == 0)
    assert torch.equal(logits_of(policy), logits_of(policy))


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("packs_rows", [True, False])
def test_layers_that_are_computed_again_give_the_same_gradients(lora_rank, packs_rows, monkeypatch):
    """Each layer runs twice; its modules keep their training mode."""
    runs = []
    forward = Qwen3Attention.forward
    monkeypatch.setattr(
        Qwen3Attention,
        "forward",
        lambda self, *given, **named: runs.append(self.training) or forward(self, *given, **named),
    )
    gradients = []
    for again in (False, True):
        config = tiny_model(lora_rank=lora_rank)
        config = config.model_copy(update={"activation_checkpointing": again})
        policy = load_policy(config, seed=0, device=CPU)
        policy.packs_rows = packs_rows
        change(policy)
        runs.clear()
        policy.logprobs(BATCH, 1.0)[0].sum().backward()
        assert len(runs) == policy.num_layers * (2 if again else 1)
        assert not any(runs)
        assert not any(module.training for module in policy.model.modules())
        gradients.append([parameter.grad for parameter in trained_tensors(policy)])
    assert all(map(torch.equal, *gradients))


def test_a_chat_template_that_cannot_be_trained_on_is_rejected_at_the_start():
    """Trap 3."""
    config = tiny_model().model_copy(update={"chat_template": "{{ messages | length }}<|end|>"})
    with pytest.raises(ConfigError):
        load_policy(config, seed=0, device=CPU)
