"""Our losses and advantages against TRL's own, on the same tensors.

The loss is `GRPOTrainer._compute_loss` itself. It is called on a stand-in with the few attributes
that it reads, on a copy of our model with TRL's own head, left-padded prompts and attention masks.
"""

import copy
import itertools
import random
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fakes import (
    GradientKeeper,
    assert_same_update,
    kl_term,
    loss_and_gradients,
    made_up_episode,
    made_up_group,
    made_up_turn,
    random_sample,
    tiny_policy,
    trained_tensors,
    trainer_config,
)

from openenv_pipe.algorithms.advantages import gdpo_advantages, step_advantages
from openenv_pipe.algorithms.packing import pack
from openenv_pipe.algorithms.samples import build_samples
from openenv_pipe.learner.learner import NOTHING, Learner
from openenv_pipe.pipeline.grpo_stage import samples_of_step
from openenv_pipe.types import Finish, Group

pytest.importorskip("trl", reason="not installed: trl")

from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head, nanstd

MAX_TOKENS = 120
KL_COEF = 0.3
ENTROPY_COEF = 0.2
CLIP_LOW, CLIP_HIGH = 0.1, 0.4

TAUS = {"tau_positive": 0.7, "tau_negative": 1.4}
SAPO = trainer_config().loss.model_dump(exclude={"clip_low", "clip_high", "max_ratio"})
SAPO |= {"type": "sapo", **TAUS}

# TRL's names of losses, and our settings for them.
LOSSES = {
    "grpo": {"loss.type": "grpo", "loss.normalise": "sample"},
    "dr_grpo": {"loss.type": "grpo", "loss.normalise": "constant"},
    "dapo": {"loss.type": "grpo", "loss.normalise": "token"},
    # the same as `token` for a single batch
    "bnpo": {"loss.type": "grpo", "loss.normalise": "token"},
    "cispo": {"loss.type": "cispo", "loss.normalise": "token"},
    "gspo": {"loss.type": "gspo", "loss.normalise": "sample"},
    "sapo": {"loss": SAPO},
}


class StandIn:
    """The attributes of a trainer that `_compute_loss` reads: one process, no accumulation, no
    extras."""

    get_off_policy_mask = staticmethod(GRPOTrainer.get_off_policy_mask)
    _get_per_token_logps_and_entropies = GRPOTrainer._get_per_token_logps_and_entropies

    def __init__(self, model: torch.nn.Module, name: str, **extras: float | bool) -> None:
        self.model = model
        self.loss_type = "grpo" if name == "gspo" else name
        self.importance_sampling_level = "sequence" if name == "gspo" else "token"
        self.beta = extras.get("beta", 0.0)
        self.epsilon_low, self.epsilon_high = CLIP_LOW, CLIP_HIGH
        if name == "cispo":  # TRL bounds the weight itself, and only from above
            self.epsilon_high = 1.0 + CLIP_HIGH
        self.max_completion_length = MAX_TOKENS
        self.top_entropy_quantile = 1.0
        self.off_policy_mask_threshold = extras.get("off_policy_limit")
        self.aux_loss_enabled = self.use_adaptive_entropy = False
        self.entropy_coef = extras.get("entropy_coef", 0.0)
        self._entropy_bonus_enabled = self.entropy_coef > 0
        self.use_vllm = self.vllm_importance_sampling_correction = extras.get("corrected", False)
        self.current_gradient_accumulation_steps = 1
        self.args = SimpleNamespace(
            delta=extras.get("delta"),
            sapo_temperature_pos=TAUS["tau_positive"],
            sapo_temperature_neg=TAUS["tau_negative"],
            use_bias_correction_kl=extras.get("weighted_kl", False),
            steps_per_generation=1,
            report_to=[],
        )
        self.accelerator = SimpleNamespace(
            num_processes=1,
            is_main_process=True,
            autocast=nullcontext,
            sync_gradients=True,
            gather=lambda value: value,
            reduce=lambda value, reduction: value,
        )
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}


def samples_of_turns(*, one_advantage=False):
    """Return samples of one to three turns whose logprobs are near the model's, so that some are
    clipped."""
    draw = random.Random(0)
    shapes = [[(3, 4)], [(5, 2), (3, 6)], [(1, 1), (7, 2), (2, 5)], [(2, 9)]]
    samples = [random_sample(draw, shape) for shape in shapes]
    if one_advantage:
        for sample in samples:
            last = sample.advantages[-1]
            sample.advantages = [last * chosen for chosen in sample.loss_mask]
    return samples


def trl_inputs(samples, **flat):
    """Return our samples as a batch for TRL: the first prompt, and the rest with a tool mask.

    `flat` holds values of the trained tokens, in the order of the samples.
    """
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
    for name, values in flat.items():
        inputs[name] = torch.zeros(tool_mask.shape)
        inputs[name][tool_mask.bool()] = values
    return inputs


def masked_as_by_trl(inputs, cut_off):
    """Mask rows as TRL's `_generate_and_score_completions` does with mask_truncated_completions."""
    keep = (~torch.tensor(cut_off)).int()[:, None]
    masks = {name: inputs[name] * keep for name in ("completion_mask", "tool_mask")}
    num_items = (masks["completion_mask"] * masks["tool_mask"]).sum()
    return inputs | masks | {"num_items_in_batch": num_items}


def trl_loss_and_gradients(
    policy, samples, name, temperature, *, flat=None, cut_off=None, **extras
):
    model = copy.deepcopy(policy.model)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    add_fused_lm_head(inner, temperature=temperature, outputs=("log_probs", "entropy"))
    trainer = StandIn(model.train(), name, **extras)
    inputs = trl_inputs(samples, **(flat or {}))
    if cut_off is not None:
        inputs = masked_as_by_trl(inputs, cut_off)
    loss = GRPOTrainer._compute_loss(trainer, model, inputs)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return loss.item(), gradients


def given_loss(name):
    """Return our settings for a loss of TRL's, with the clips of the stand-in."""
    if name == "sapo":
        return LOSSES[name]
    clip_low = 1.0 if name == "cispo" else CLIP_LOW
    return LOSSES[name] | {"loss.clip_low": clip_low, "loss.clip_high": CLIP_HIGH}


def our_loss_and_gradients(policy, samples, name, temperature, uncomputed=NOTHING, **changes):
    """Return the learner's loss and gradients, with the policy's own reference."""
    keep, policy.keep_reference = policy.keep_reference, lambda: None
    try:
        given = given_loss(name) | {"temperature": temperature} | changes
        return loss_and_gradients(policy, samples, given, uncomputed)
    finally:
        policy.keep_reference = keep


def moved_policy(lora_rank):
    """Return a policy that differs from its reference and whose adapter is not zero."""
    policy = tiny_policy(lora_rank=lora_rank)
    policy.keep_reference()
    generator = torch.Generator().manual_seed(0)
    for parameter in trained_tensors(policy):
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return policy


def assert_close(ours, theirs):
    """Assert losses equal to 1e-5, and each gradient entry to 1e-5 absolutely."""
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    assert len(ours[1]) == len(theirs[1])
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert (one - other).abs().max() < 1e-5
    assert_same_update(ours, theirs)


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_trls(name, temperature, lora_rank):
    """GSPO has one advantage per sample here: TRL averages several, we credit each token."""
    policy, samples = moved_policy(lora_rank), samples_of_turns(one_advantage=name == "gspo")
    ours = our_loss_and_gradients(policy, samples, name, temperature)
    theirs = trl_loss_and_gradients(policy, samples, name, temperature)
    assert_close(ours, theirs)
    assert abs(theirs[0]) > 1e-3


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo"])
def test_with_a_reference_loss_and_gradients_are_trls(name, weighted):
    """Trap 23: TRL has only the k3 estimator, and weights whole samples under GSPO."""
    policy, samples = moved_policy(2), samples_of_turns()
    reference = policy.reference_logprobs(pack(samples, share=False), 0.7)
    flat = {"ref_per_token_logps": reference}
    kl = kl_term(KL_COEF, importance_weights=weighted)
    ours = our_loss_and_gradients(policy, samples, name, 0.7, **{"loss.kl": kl})
    extras = {"beta": KL_COEF, "weighted_kl": weighted}
    theirs = trl_loss_and_gradients(policy, samples, name, 0.7, flat=flat, **extras)
    assert_close(ours, theirs)
    plain = our_loss_and_gradients(policy, samples, name, 0.7)
    assert abs(plain[0] - theirs[0]) > 1e-3


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
def test_with_a_two_sided_clip_loss_and_gradients_are_trls(name):
    policy, samples = moved_policy(0), samples_of_turns(one_advantage=True)
    delta = 1.0 + CLIP_HIGH + 0.1
    ours = our_loss_and_gradients(policy, samples, name, 0.7, **{"loss.max_ratio": delta})
    assert_close(ours, trl_loss_and_gradients(policy, samples, name, 0.7, delta=delta))
    plain = our_loss_and_gradients(policy, samples, name, 0.7)
    assert abs(plain[0] - ours[0]) > 1e-3


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_with_an_entropy_bonus_loss_and_gradients_are_trls(name):
    policy, samples = moved_policy(0), samples_of_turns(one_advantage=True)
    ours = our_loss_and_gradients(policy, samples, name, 0.7, **{"loss.entropy_coef": ENTROPY_COEF})
    theirs = trl_loss_and_gradients(policy, samples, name, 0.7, entropy_coef=ENTROPY_COEF)
    assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(["grpo", "dr_grpo", "dapo", "cispo"], ["truncate", "mask"]),
        ("grpo", "geometric"),
        ("gspo", "geometric"),  # TRL averages per-token weights, we apply them per token
        ("grpo", "geometric_mask"),
    ],
)
def test_with_a_correction_loss_and_gradients_are_trls(name, kind):
    """TRL's `token_truncate` and `token_mask`; the old logprobs are then the trainer's own."""
    policy, samples = moved_policy(0), samples_of_turns(one_advantage=True)
    batch = pack(samples, share=False)
    with torch.no_grad():
        old = policy.logprobs(batch, 0.7)[0]
    low, high = (0.9, 1.2) if kind.startswith("geometric") else (0.5, 2.0)
    differences = old - batch.logprobs
    if kind.startswith("geometric"):
        lengths = [sum(sample.loss_mask) for sample in samples]
        parts = differences.split(lengths)
        differences = torch.cat([part.mean().expand(len(part)) for part in parts])
    weights = torch.exp(differences)
    outside = (weights < low) | (weights > high)
    weights = weights.masked_fill(outside, 0.0) if "mask" in kind else weights.clamp(max=high)
    assert 0 < outside.sum() < len(outside)
    correction = {"type": kind, "low": low, "high": high}
    ours = our_loss_and_gradients(policy, samples, name, 0.7, **{"loss.correction": correction})
    flat = {"old_per_token_logps": old, "importance_sampling_ratio": weights}
    theirs = trl_loss_and_gradients(policy, samples, name, 0.7, flat=flat, corrected=True)
    assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo"])
def test_with_an_off_policy_mask_loss_and_gradients_are_trls(name):
    policy, samples = moved_policy(0), samples_of_turns(one_advantage=True)
    batch = pack(samples, share=False)
    with torch.no_grad():
        drift = batch.logprobs - policy.logprobs(batch, 0.7)[0]
    lengths = [sum(sample.loss_mask) for sample in samples]
    down = [each.mean().item() for each in drift.split(lengths)]
    for sample, change in zip(samples, down, strict=True):  # the one that lost most goes down
        size = -1.0 if change == max(down) else 0.7
        sample.advantages = [size * chosen for chosen in sample.loss_mask]
    limit = max(down) - 0.01
    assert limit > 0.0
    ours = our_loss_and_gradients(policy, samples, name, 0.7, **{"loss.off_policy_limit": limit})
    theirs = trl_loss_and_gradients(policy, samples, name, 0.7, off_policy_limit=limit)
    assert_close(ours, theirs)
    plain = our_loss_and_gradients(policy, samples, name, 0.7)
    assert abs(plain[0] - ours[0]) > 1e-3


class Mover(GradientKeeper):
    """Changes the weights after each update, by numbers that are always the same."""

    def step(self):
        generator = torch.Generator().manual_seed(len(self.updates))
        super().step()
        for parameter in self._parameters:
            parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator)
        return 0.0


@pytest.mark.parametrize("name", LOSSES)
def test_each_of_two_passes_has_the_gradients_of_trls_iterations(name):
    """With num_iterations=2, TRL takes both ratios to the logprobs of before the first."""
    policy, samples = moved_policy(2), samples_of_turns(one_advantage=True)
    trainer = trainer_config(given_loss(name) | {"passes_per_step": 2, "temperature": 0.7})
    theirs = copy.deepcopy(policy)
    learner = Learner(policy, trainer, max_episode_tokens=MAX_TOKENS, seed=0)
    learner.optimizer = ours = Mover(policy)
    metrics = learner.update(samples, 1)
    losses, mover = [], Mover(theirs)
    for number in range(2):
        loss, gradients = trl_loss_and_gradients(theirs, samples, name, 0.7)
        assert_close((loss, ours.updates[number]), (loss, gradients))
        losses.append(loss)
        for parameter, gradient in zip(trained_tensors(theirs), gradients, strict=True):
            parameter.grad = gradient
        mover.step()
    assert metrics["loss/total"] == pytest.approx(sum(losses) / 2, abs=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-3


def groups_of_which_one_has_a_signal():
    """Return the advantages of four groups of episodes of different lengths."""
    draw = random.Random(1)

    def turn():
        ids = [draw.randrange(5, 250) for _ in range(draw.randrange(4, 9))]
        return made_up_turn(ids[:2], ids[2:], logprobs=[-draw.uniform(4.0, 7.0) for _ in ids[2:]])

    groups = []
    for number in range(4):
        rewards = [0.0, 1.0, 5.0] if number == 2 else [1.0] * 3
        episodes = [
            made_up_episode(reward, member=member, turns=[turn() for _ in range(1 + member)])
            for member, reward in enumerate(rewards)
        ]
        groups.append(Group(id=str(number), task=episodes[0].task, episodes=episodes))
    return step_advantages(groups, baseline="group", scale="none", discount=1.0)


def over_all_groups(extra, policy, rows):
    """Return changes of our loss, arguments of TRL's, and its values for the rows."""
    changes, given, flat = {"loss.normalise_groups": "all"}, {}, {}
    if extra == "kl":
        changes["loss.kl"] = kl_term(KL_COEF)
        given["beta"] = KL_COEF
        flat["ref_per_token_logps"] = policy.reference_logprobs(pack(rows, share=False), 0.7)
    if extra == "entropy":
        changes["loss.entropy_coef"] = given["entropy_coef"] = ENTROPY_COEF
    return changes, given, flat


@pytest.mark.parametrize("extra", ["none", "kl", "entropy"])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "gspo"])
def test_groups_without_a_signal_count_as_rows_without_an_advantage(name, extra):
    """Of four groups three have a signal of zero: TRL's mean is over all of them, and so is ours
    with `normalise_groups: all`; a KL term or an entropy bonus is about their tokens, too."""
    advantages, policy = groups_of_which_one_has_a_signal(), moved_policy(0)
    rows = build_samples(advantages, every_group=True)
    alive = build_samples(advantages)
    assert (len(rows), len(alive)) == (12, 3)
    changes, given, flat = over_all_groups(extra, policy, rows)
    samples, uncomputed = samples_of_step(advantages, trainer_config(changes).loss)
    assert samples == (alive if extra == "none" else rows)
    ours = our_loss_and_gradients(policy, samples, name, 0.7, uncomputed, **changes)
    theirs = trl_loss_and_gradients(policy, rows, name, 0.7, flat=flat, **given)
    assert_close(ours, theirs)
    changes["loss.normalise_groups"] = "with_signal"
    samples, uncomputed = samples_of_step(advantages, trainer_config(changes).loss)
    ours = our_loss_and_gradients(policy, samples, name, 0.7, uncomputed, **changes)
    if extra == "kl":
        flat["ref_per_token_logps"] = policy.reference_logprobs(pack(alive, share=False), 0.7)
    assert_close(ours, trl_loss_and_gradients(policy, alive, name, 0.7, flat=flat, **given))


@pytest.mark.parametrize("extra", ["none", "kl", "entropy"])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "gspo"])
def test_masked_episodes_count_as_in_trl(name, extra):
    """Of twelve episodes two are cut off, one of them in a group with a signal: they have no loss,
    and TRL's mean over episodes has them, its mean over tokens does not."""
    advantages, policy = groups_of_which_one_has_a_signal(), moved_policy(0)
    for number, member in ((0, 0), (2, 1)):
        advantages[number].group.episodes[member].turns[-1].finish = Finish.LENGTH
    masked = [each.without_truncated() for each in advantages]
    assert [sorted(each.masked) for each in masked] == [[0], [], [1], []]
    rows = build_samples(advantages, every_group=True)
    cut_off = [(row.group, row.member) in (("0", 0), ("2", 1)) for row in rows]
    changes, given, flat = over_all_groups(extra, policy, rows)
    samples, uncomputed = samples_of_step(masked, trainer_config(changes).loss)
    assert len(samples) == (2 if extra == "none" else 10)
    ours = our_loss_and_gradients(policy, samples, name, 0.7, uncomputed, **changes)
    theirs = trl_loss_and_gradients(policy, rows, name, 0.7, flat=flat, cut_off=cut_off, **given)
    assert_close(ours, theirs)


@pytest.mark.parametrize("num_generations", [2, 4, 8])
@pytest.mark.parametrize("scale", ["group", "none"])
def test_group_advantages_are_trls(scale, num_generations):
    """The formula is that of `_generate_and_score_completions`, with TRL's own `nanstd`."""
    rewards = torch.rand(5, num_generations, generator=torch.Generator().manual_seed(0))
    expected = rewards - rewards.nanmean(dim=1, keepdim=True)
    if scale == "group":
        expected = expected / (nanstd(rewards, dim=1)[:, None] + 1e-4)
    for row, values in zip(rewards.tolist(), expected.tolist(), strict=True):
        (ours,) = step_advantages([made_up_group(row)], baseline="group", scale=scale, discount=1.0)
        assert [ours.by_member[member][0] for member in range(num_generations)] == pytest.approx(
            values, abs=1e-4
        )


def test_gdpo_advantages_are_trls():
    """The formula is that of `multi_objective_aggregation="normalize_then_sum"`; a group in which
    all terms are equal, and a term that is equal in a group, give nothing."""
    rewards = torch.rand(4, 3, 2, generator=torch.Generator().manual_seed(0))  # group, member, term
    rewards[..., 1] *= 100.0
    rewards[1, :, 0], rewards[3] = 0.25, 0.5
    weights = {"small": 2.0, "large": 0.5}
    scaled = (rewards - rewards.nanmean(dim=1, keepdim=True)) / (nanstd(rewards, 1)[:, None] + 1e-4)
    sums = (scaled * torch.tensor(list(weights.values()))).nansum(dim=2)
    expected = (sums - sums.nanmean()) / (nanstd(sums) + 1e-4)
    groups = []
    for number, rows in enumerate(rewards.tolist()):
        group = made_up_group([0.0] * 3, id=str(number))
        for episode, (small, large) in zip(group.episodes, rows, strict=True):
            episode.reward_terms = {"small": 9.0, "small/transformed": small, "large": large}
        groups.append(group)
    for each, values in zip(
        gdpo_advantages(groups, weights=weights), expected.tolist(), strict=True
    ):
        ours = [each.by_member[member][0] for member in sorted(each.by_member)]
        assert ours == pytest.approx(values if each.has_signal else [], abs=1e-5)
    assert expected[3].abs().max() < 1e-5
    signals = [each.has_signal for each in gdpo_advantages(groups, weights=weights)]
    assert signals == [True, True, True, False]
