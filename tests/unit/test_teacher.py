"""The teacher: another model as the reference of the KL term (on-policy distillation)."""

import json

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
    trained_tensors,
)

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.errors import ConfigError
from openenv_pipe.learner.checkpoint import load_progress, save_progress
from openenv_pipe.learner.devices import Devices
from openenv_pipe.models.load import load_policy, load_tokenizer
from openenv_pipe.models.memory_estimate import memory_bytes, tiny_shape
from openenv_pipe.models.teacher import (
    find_teacher_shapes,
    find_teachers,
    give_teachers,
    teacher_divergence,
)
from openenv_pipe.pipeline.facts import policy_facts
from openenv_pipe.pipeline.served_teacher import check_teachers
from openenv_pipe.runs.differences import find_other_facts

SAMPLES = random_samples(0)
BATCH = pack(SAMPLES, share=False)


@pytest.fixture
def teacher(tmp_path):
    """A model of another size than the policy, in a folder."""
    policy = load_policy(
        tiny_model(seed=5).model_copy(update={"hidden_size": 48}), seed=0, device=CPU
    )
    for parameter in trained_tensors(policy):
        parameter.data += 0.05 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(2)
        )
    folder = tmp_path / "teacher"
    folder.mkdir()
    policy.save_model(folder)
    policy.save_tokenizer(folder)
    return folder


def distilling(folder, **changes):
    given = {
        "trainer.loss.policy_coef": 0.0,
        "trainer.loss.normalise": "token",
        "trainer.loss.kl.coef": 1.0,
        "trainer.loss.kl.reference": str(folder),
        "trainer.loss.kl.estimator": "k2",
    }
    return run_config(given | changes)


def own_logprobs(folder, temperature):
    """Return the logprobs of trained tokens by transformers' own forward pass."""
    model = tiny_teacher(folder).model
    found = []
    for sample in SAMPLES:
        ids = torch.tensor([sample.token_ids])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1] / temperature
        chosen = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        found.append(chosen[torch.tensor(sample.loss_mask[1:])])
    return torch.cat(found)


def tiny_teacher(folder):
    policy = tiny_policy()
    give_teachers(policy, distilling(folder))
    return policy.teachers[""]


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_reference_is_the_teacher_whatever_the_policy_becomes(teacher, lora_rank):
    policy, config = tiny_policy(lora_rank=lora_rank), distilling(teacher)
    learner = Devices(config, CPU).learner(policy)
    expected = own_logprobs(teacher, 0.7)
    assert torch.allclose(policy.reference_logprobs(BATCH, 0.7), expected, atol=1e-5)
    before = policy.reference_logprobs(BATCH, 0.7)
    learner.update(SAMPLES, 1)
    assert torch.equal(policy.reference_logprobs(BATCH, 0.7), before)


@pytest.mark.parametrize("estimator", ["k2", "exact"])
def test_the_policy_moves_towards_the_teacher(teacher, estimator):
    kl = {"importance_weights": False, "estimator": estimator}
    changes = {f"trainer.loss.kl.{name}": value for name, value in kl.items()}
    config = distilling(teacher, **changes, **{"trainer.optimizer.lr": 1e-2})
    learner = Devices(config, CPU).learner(tiny_policy())
    kls = [learner.update(SAMPLES, step)["loss/kl"] for step in range(1, 9)]
    assert kls[-1] < kls[0] / 2


def test_the_divergence_is_the_mean_of_the_log_ratio_under_the_policy(teacher):
    """Tokens that only the teacher has add nothing."""
    policy = tiny_policy()
    give_teachers(policy, distilling(teacher))
    policy.teachers[""].model.resize_token_embeddings(300)
    found = teacher_divergence(policy, policy.predictors_hidden(BATCH), BATCH, 0.7)
    expected = []
    for sample in SAMPLES:
        ids = torch.tensor([sample.token_ids])
        ours, theirs = (
            torch.log_softmax(model(input_ids=ids).logits[0, :-1] / 0.7, dim=-1)
            for model in (policy.model, policy.teachers[""].model)
        )
        each = (ours.exp() * (ours - theirs[:, : ours.shape[1]])).sum(dim=-1)
        expected.append(each[torch.tensor(sample.loss_mask[1:])])
    assert torch.allclose(found, torch.cat(expected), atol=1e-5)
    assert (found > 0).all()


@pytest.mark.parametrize("estimator", ["k2", "exact"])
def test_each_environment_has_its_own_teacher(teacher, estimator):
    """The gradient of a mixture is the weighted sum of those of its environments alone."""
    kl = {"importance_weights": False, "estimator": estimator}
    changes = {"loss.policy_coef": 0.0, "loss.normalise": "token"}
    changes["loss.kl"] = distilling(teacher).trainer.loss.kl.model_dump() | kl
    mixed, first, second = tiny_policy(), tiny_policy(), tiny_policy()
    first.teachers[""] = mixed.teachers[""] = tiny_teacher(teacher)
    second.teachers["other"] = mixed.teachers["other"] = tiny_policy(seed=9)
    samples = random_samples(0)
    for sample in samples[::2]:
        sample.env = "other"
    found = loss_and_gradients(mixed, samples, changes)
    parts = [
        (samples[1::2], loss_and_gradients(first, samples[1::2], changes)),
        (samples[::2], loss_and_gradients(second, samples[::2], changes)),
    ]
    num_tokens = [sum(sum(each.loss_mask) for each in part) for part, _ in parts]
    shares = [number / sum(num_tokens) for number in num_tokens]
    loss = sum(share * part[0] for share, (_, part) in zip(shares, parts, strict=True))
    gradients = [
        shares[0] * one + shares[1] * other
        for one, other in zip(parts[0][1][1], parts[1][1][1], strict=True)
    ]
    assert_same_update(found, (loss, gradients))
    assert abs(parts[0][1][0] - parts[1][1][0]) > 1e-3


def test_without_a_weight_rewards_count_for_nothing(teacher):
    changes = {"loss.policy_coef": 0.0, "loss.kl": distilling(teacher).trainer.loss.kl.model_dump()}
    found = []
    for sign in (1.0, -1.0):
        policy, samples = tiny_policy(), random_samples(0)
        give_teachers(policy, distilling(teacher))
        for sample in samples:
            sample.advantages = [sign * each for each in sample.advantages]
        found.append(loss_and_gradients(policy, samples, changes))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(*pair) for pair in zip(found[0][1], found[1][1], strict=True))


def test_a_checkpoint_has_no_copy_of_the_teacher(teacher, tmp_path):
    policy = tiny_policy()
    learner = Devices(distilling(teacher), CPU).learner(policy)
    learner.update(SAMPLES, 1)
    (folder := tmp_path / "resume").mkdir()
    save_progress(folder, policy, learner.optimizer)
    assert sorted(each.name for each in folder.iterdir()) == [
        "optimizer.safetensors",
        "progress.json",
    ]
    again = tiny_policy()
    resumed = Devices(distilling(teacher), CPU).learner(again)
    load_progress(folder, again, resumed.optimizer)
    expected = policy.reference_logprobs(BATCH, 1.0)
    assert torch.equal(again.reference_logprobs(BATCH, 1.0), expected)


def test_threads_share_the_weights_of_the_teacher(teacher):
    policy = tiny_policy()
    give_teachers(policy, distilling(teacher))
    other = policy.with_own_gradients()
    pairs = zip(
        policy.teachers[""].model.parameters(), other.teachers[""].model.parameters(), strict=True
    )
    assert all(one is two for one, two in pairs)
    expected = policy.reference_logprobs(BATCH, 1.0)
    assert torch.equal(other.reference_logprobs(BATCH, 1.0), expected)


def test_its_memory_is_counted(teacher):
    config = distilling(teacher)
    shape = tiny_shape(config.model)
    alone = memory_bytes(shape, config, in_one_memory=True)
    found = memory_bytes(shape, config, in_one_memory=True, teachers=find_teacher_shapes(config))
    num_parameters = sum(each.numel() for each in tiny_teacher(teacher).model.parameters())
    assert found == alone | {"teacher": 4 * num_parameters}
    assert "reference model" not in found


def test_what_is_checked_of_it(teacher):
    assert check_teachers(distilling(teacher)).endswith("; its vocabulary is the policy's")
    assert check_teachers(distilling(teacher, **{"trainer.loss.kl.coef": 0.0})) == ""
    assert check_teachers(run_config()) == ""


def test_other_weights_of_it_are_another_fact(teacher):
    """A folder such as checkpoints/best moves while the run that it is in goes on."""
    config, found = distilling(teacher), []
    for change in (0.0, 0.5):
        policy = load_policy(tiny_model(), seed=0, device=CPU)
        give_teachers(policy, config)
        found.append(policy_facts(policy)["teacher_digest"])
        with torch.no_grad():
            policy.teachers[""].model.get_input_embeddings().weight += 0.5 + change
        policy.teachers[""].save_model(teacher)
    assert found[0] != found[1]
    (difference,) = find_other_facts({"teacher_digest": "a"}, {"teacher_digest": "b"})
    assert difference.kind == "model"
    assert "teacher_digest" not in policy_facts(tiny_policy())


def test_an_adapter_is_rejected_with_what_to_do(teacher):
    (teacher / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"it is an adapter.*openenv-pipe export"):
        check_teachers(distilling(teacher))


def test_a_teacher_may_have_more_tokens_but_not_fewer_positions(teacher):
    tokenizer = load_tokenizer(find_teachers(distilling(teacher))[0].model)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(teacher)
    assert "the policy's" in check_teachers(distilling(teacher))
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    with pytest.raises(ConfigError, match=r"16 positions, which are fewer than env\.max_episode"):
        give_teachers(tiny_policy(), distilling(teacher))


def test_another_vocabulary_is_rejected(teacher):
    path = teacher / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="does not have the policy's vocabulary"):
        check_teachers(distilling(teacher))


def test_a_teacher_that_is_not_there_is_named_by_its_key(tmp_path):
    missing = tmp_path / "nothing"
    with pytest.raises(ConfigError, match=rf"trainer\.loss\.kl\.reference='{missing}' is neither"):
        check_teachers(distilling(missing))
    with pytest.raises(ConfigError, match=r"trainer\.loss\.kl\.reference='some/teacher' is not on"):
        check_teachers(distilling("some/teacher"))


def test_a_teacher_without_rows_for_all_tokens_is_rejected(teacher):
    policy = tiny_policy()
    policy.model.resize_token_embeddings(300)
    with pytest.raises(ConfigError, match="has 261 embeddings, and the policy 300"):
        give_teachers(policy, distilling(teacher))
