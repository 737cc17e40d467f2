"""Distillation against TRL's own losses, on the same tensors.

TRL's `DistillationTrainer` has the divergence over the whole vocabulary; with `beta=1` it is the
reverse KL. Its loss is called on the last hidden states of both models.

TRL's `IWOPDTrainer` has the reverse KL on sampled tokens; with `iw_opd_gamma=0` all tokens weigh
the same. Its loss is called on a stand-in with the few attributes that it reads.
"""

import copy
import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from fakes import (
    CPU,
    assert_same_update,
    loss_and_gradients,
    random_samples,
    run_config,
    tiny_model,
    tiny_policy,
)

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.models.load import load_policy

pytest.importorskip("trl", reason="not installed: trl")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it is experimental
    from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss

TEMPERATURE = 0.7


def distilled(policy):
    """Give the policy a teacher of another size; return samples that the policy itself sampled."""
    config = tiny_model(seed=5).model_copy(update={"hidden_size": 48})
    policy.teachers[""] = load_policy(config, seed=0, device=CPU)
    samples = random_samples(0)
    with torch.no_grad():
        logprobs = policy.logprobs(pack(samples, share=False), TEMPERATURE)[0].tolist()
    for sample in samples:
        sample.logprobs = [logprobs.pop(0) if chosen else 0.0 for chosen in sample.loss_mask]
    return samples


def padded(samples, name):
    rows = [torch.tensor(getattr(sample, name)) for sample in samples]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def trl_loss_and_gradients(policy, samples):
    """The loss of TRL's `IWOPDTrainer` over the trained tokens of all samples."""
    model, teacher = copy.deepcopy(policy.model), policy.teachers[""].model
    ids, chosen = padded(samples, "token_ids"), padded(samples, "loss_mask")[:, 1:]
    tokens = ids[:, 1:]
    with torch.no_grad():
        theirs = torch.log_softmax(teacher(input_ids=ids).logits[:, :-1] / TEMPERATURE, dim=-1)
    trainer = SimpleNamespace(
        temperature=TEMPERATURE,
        iw_opd_gamma=0.0,
        iw_opd_epsilon=1e-8,
        model=model,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )
    loss = IWOPDTrainer._compute_iw_opd_loss(
        trainer,
        student_logits=model(input_ids=ids).logits[:, :-1],
        completion_tokens=tokens,
        labels=tokens.masked_fill(~chosen, -100),
        teacher_actual_logprobs=theirs.gather(-1, tokens[..., None])[..., 0],
    )
    loss.backward()
    return loss.item(), [each.grad for each in model.parameters() if each.requires_grad]


def divergence_and_gradients(policy, samples):
    """The loss of TRL's `DistillationTrainer` over the trained tokens of all samples."""
    model, teacher = copy.deepcopy(policy.model), policy.teachers[""].model
    ids = padded(samples, "token_ids")
    loss, _, num_tokens = _chunked_divergence_loss(
        model(input_ids=ids, output_hidden_states=True).hidden_states[-1][:, :-1],
        teacher(input_ids=ids, output_hidden_states=True).hidden_states[-1][:, :-1].detach(),
        model.get_output_embeddings().weight,
        teacher.get_output_embeddings().weight,
        padded(samples, "loss_mask")[:, 1:],
        beta=1.0,
        temperature=TEMPERATURE,
    )
    assert num_tokens == sum(sum(sample.loss_mask) for sample in samples)
    loss.backward()
    return loss.item(), [each.grad for each in model.parameters() if each.requires_grad]


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("estimator", ["k2", "exact"])
def test_the_gradient_is_that_of_trls_distillation(estimator, lora_rank):
    """Of `k2` the loss is another one, whose gradient is the same."""
    policy = tiny_policy(lora_rank=lora_rank)
    samples = distilled(policy)
    changes = {
        "temperature": TEMPERATURE,
        "loss.policy_coef": 0.0,
        "loss.normalise": "token",
        "loss.kl": run_config().trainer.loss.kl.model_dump()
        | {"coef": 1.0, "reference": "a teacher", "estimator": estimator},
    }
    ours = loss_and_gradients(policy, samples, changes)
    if estimator == "exact":
        theirs = divergence_and_gradients(policy, samples)
        assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    else:
        theirs = trl_loss_and_gradients(policy, samples)
    assert max(each.abs().max() for each in theirs[1]) > 1e-3
    assert_same_update((0.0, ours[1]), (0.0, theirs[1]))
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert (one - other).abs().max() < 1e-5
