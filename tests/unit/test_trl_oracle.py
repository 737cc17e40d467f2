"""TRL as the oracle: its own loss and its own advantages, on the same tensors as ours.

The loss is `GRPOTrainer._compute_loss` itself, called on a stand-in with the few attributes that
it reads, and on a copy of our model with TRL's own head, left-padded prompts and attention masks.
"""

import copy
import random
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fakes import (
    assert_same_update,
    loss_and_gradients,
    made_up_group,
    random_sample,
    tiny_policy,
    trained_tensors,
)

from openenv_pipe.grpo.advantages import group_advantages
from openenv_pipe.grpo.losses import kl_k3, token_weights
from openenv_pipe.grpo.packing import collate

pytest.importorskip("trl", reason="not installed: trl")

from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head, nanstd

MAX_TOKENS = 120
KL_COEF = 0.3
CLIPS = {"loss.clip_low": 0.1, "loss.clip_high": 0.4}


class StandIn:
    """What `_compute_loss` asks of its trainer: one process, no accumulation, no extras."""

    _get_per_token_logps_and_entropies = GRPOTrainer._get_per_token_logps_and_entropies

    def __init__(self, model: torch.nn.Module, loss_type: str, beta: float) -> None:
        self.model = model
        self.loss_type = loss_type
        self.beta = beta
        self.epsilon_low, self.epsilon_high = CLIPS["loss.clip_low"], CLIPS["loss.clip_high"]
        self.max_completion_length = MAX_TOKENS
        self.importance_sampling_level = "token"
        self.top_entropy_quantile = 1.0
        self.off_policy_mask_threshold = None
        self.aux_loss_enabled = self._entropy_bonus_enabled = self.use_vllm = False
        self.current_gradient_accumulation_steps = 1
        self.args = SimpleNamespace(
            delta=None, use_bias_correction_kl=False, steps_per_generation=1, report_to=[]
        )
        self.accelerator = SimpleNamespace(
            num_processes=1,
            is_main_process=True,
            autocast=nullcontext,
            gather=lambda value: value,
            reduce=lambda value, reduction: value,
        )
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}


def samples_of_turns():
    """Ragged samples of one to three turns. Logprobs are near the model's, so some are clipped."""
    draw = random.Random(0)
    shapes = [[(3, 4)], [(5, 2), (3, 6)], [(1, 1), (7, 2), (2, 5)], [(2, 9)]]
    return [random_sample(draw, shape) for shape in shapes]


def trl_inputs(samples, reference_logprobs=None):
    """Our samples as TRL's batch: the first prompt, and all after it with a tool mask."""
    first = [sample.loss_mask.index(True) for sample in samples]

    def before(name, fill):
        rows = [getattr(s, name)[:n] for s, n in zip(samples, first, strict=True)]
        width = max(map(len, rows))
        return torch.tensor([[fill] * (width - len(row)) + row for row in rows])

    def after(name):
        rows = [getattr(s, name)[n:] for s, n in zip(samples, first, strict=True)]
        width = max(map(len, rows))
        return torch.tensor([row + [0] * (width - len(row)) for row in rows])

    lengths = [len(sample.token_ids) - n for sample, n in zip(samples, first, strict=True)]
    prompt_mask = before("loss_mask", True) == 0
    completion_ids = after("token_ids")
    completion_mask = torch.arange(completion_ids.shape[1]) < torch.tensor(lengths)[:, None]
    tool_mask = after("loss_mask").int()
    inputs = {
        "prompt_ids": before("token_ids", 0),
        "prompt_mask": prompt_mask.int(),
        "completion_ids": completion_ids,
        "completion_mask": completion_mask.int(),
        "tool_mask": tool_mask,
        "advantages": after("advantages"),
        "old_per_token_logps": after("logprobs"),
        "num_items_in_batch": tool_mask.sum(),
    }
    if reference_logprobs is not None:
        values = torch.zeros(tool_mask.shape)
        values[tool_mask.bool()] = reference_logprobs
        inputs["ref_per_token_logps"] = values
    return inputs


def trl_loss_and_gradients(policy, samples, loss_type, temperature, reference_logprobs=None):
    model = copy.deepcopy(policy.model)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    add_fused_lm_head(inner, temperature=temperature, outputs=("log_probs", "entropy"))
    beta = 0.0 if reference_logprobs is None else KL_COEF
    trainer = StandIn(model.train(), loss_type, beta)
    loss = GRPOTrainer._compute_loss(trainer, model, trl_inputs(samples, reference_logprobs))
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return loss.item(), gradients


def moved_policy(lora_rank):
    """Off its start, so that it differs from its reference, and its adapter is not zero."""
    policy = tiny_policy(lora_rank=lora_rank)
    policy.keep_reference()
    generator = torch.Generator().manual_seed(0)
    for parameter in trained_tensors(policy):
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return policy


def assert_close(ours, theirs):
    """Loss to 1e-5; every entry of every gradient to 1e-5, absolutely."""
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    assert len(ours[1]) == len(theirs[1])
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert (one - other).abs().max() < 1e-5
    assert_same_update(ours, theirs)


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_loss_and_gradients_are_trls(loss_type, temperature, lora_rank):
    policy, samples = moved_policy(lora_rank), samples_of_turns()
    ours = loss_and_gradients(
        policy, samples, CLIPS | {"loss.type": loss_type, "temperature": temperature}
    )
    theirs = trl_loss_and_gradients(policy, samples, loss_type, temperature)
    assert_close(ours, theirs)
    assert abs(theirs[0]) > 1e-3


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_with_a_reference_loss_and_gradients_are_trls(loss_type, temperature, lora_rank):
    policy, samples = moved_policy(lora_rank), samples_of_turns()
    batch = collate(samples)
    reference = policy.reference_logprobs(batch, temperature)
    theirs = trl_loss_and_gradients(policy, samples, loss_type, temperature, reference)
    loss, gradients = kl_update(policy, samples, loss_type, temperature)
    weights = token_weights(
        batch.loss_mask,
        loss_type=loss_type,
        num_samples=len(samples),
        num_tokens=int(batch.loss_mask.sum()),
        max_tokens=MAX_TOKENS,
    )
    with torch.no_grad():
        kl = (weights * kl_k3(policy.logprobs(batch, temperature)[0], reference)).sum().item()
    assert_close((loss + KL_COEF * kl, gradients), theirs)
    assert kl > 1e-3


def kl_update(policy, samples, loss_type, temperature):
    """The learner's gradients with its KL part; its policy loss is reported without."""
    keep, policy.keep_reference = policy.keep_reference, lambda: None
    try:
        return loss_and_gradients(
            policy,
            samples,
            CLIPS | {"loss.type": loss_type, "temperature": temperature, "loss.kl_coef": KL_COEF},
        )
    finally:
        policy.keep_reference = keep


@pytest.mark.parametrize("num_generations", [2, 4, 8])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_group_advantages_are_trls(scale, num_generations):
    """The formula of `_generate_and_score_completions`, with TRL's own `nanstd`."""
    rewards = torch.rand(5, num_generations, generator=torch.Generator().manual_seed(0))
    expected = rewards - rewards.nanmean(dim=1, keepdim=True)
    if scale == "std":
        expected = expected / (nanstd(rewards, dim=1)[:, None] + 1e-4)
    for row, values in zip(rewards.tolist(), expected.tolist(), strict=True):
        ours = group_advantages(made_up_group(row), scale=scale, discount=1.0)
        assert [ours[member][0] for member in range(num_generations)] == pytest.approx(
            values, abs=1e-4
        )
