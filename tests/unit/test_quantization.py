"""Weights in four bits under an adapter, and optimizer moments in eight: values, memory, errors.

Most of these tests need bitsandbytes. Every process that imports peft would load it, which takes a
second, so `.ci/run` installs it for this file alone.
"""

import importlib.util
import sys

import pytest
import torch
from fakes import (
    CPU,
    loss_and_gradients,
    random_samples,
    resume_from,
    run_config,
    tiny_model,
    trained_tensors,
    trainer_config,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from openenv_pipe.config.schema.model import _Model
from openenv_pipe.errors import ConfigError
from openenv_pipe.learner.checkpoint import save_weights
from openenv_pipe.learner.learner import Learner
from openenv_pipe.models.load import load_policy
from openenv_pipe.models.memory_estimate import memory_bytes, num_in_layers, tiny_shape
from openenv_pipe.models.quantization import dense_state, load_bitsandbytes
from openenv_pipe.models.weights import PolicyWeights

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="needs the extra `quantization`; .ci/run has it for this file alone",
)
TOKEN_IDS = torch.tensor([[5, 6, 7, 8, 200]])
NF4_ERROR = 0.12  # of the norm of a matrix with normally distributed values
# rows are whole quantization blocks
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4}


def model_config(quantization="nf4", autocast="float32", **changes):
    model = tiny_model(lora_rank=4, autocast=autocast).model_dump() | WIDE | changes
    return run_config({"model": model | {"quantization": quantization}}).model


def policy_of(quantization="nf4", **changes):
    """Return a policy with quantized weights and an adapter that is not zero."""
    policy = load_policy(model_config(quantization, **changes), seed=1, device=CPU)
    draw = torch.Generator().manual_seed(1)
    for name, values in policy.trained_parameters():
        if "lora_B" in name:
            values.data = torch.randn(values.shape, generator=draw) * 0.05
    return policy


def written_out(policy):
    """Return the same policy on dense weights that hold the dequantized values."""
    dense = policy_of("none")
    dense.model.get_base_model().load_state_dict(dense_state(policy.model.get_base_model()))
    return dense


def logits_of(policy):
    with torch.no_grad():
        return policy.logits(policy.hidden(TOKEN_IDS))


def learner_of(policy, changes):
    return Learner(policy, trainer_config(changes), max_episode_tokens=120, seed=0)


# --- weights ------------------------------------------------------------------------------------


@needs_bitsandbytes
def test_layers_are_rounded_and_all_else_is_as_it_was():
    plain, small = (load_policy(model_config(q), seed=1, device=CPU) for q in ("none", "nf4"))
    expected = plain.model.get_base_model().state_dict()
    found = dense_state(small.model.get_base_model())
    assert found.keys() == expected.keys()
    num_rounded = 0
    for name, values in expected.items():
        if "base_layer" in name:
            error = (found[name] - values).norm() / values.norm()
            assert 0.0 < error < NF4_ERROR, name
            num_rounded += 1
        else:
            assert torch.equal(found[name], values), name
    assert num_rounded == 7 * 2
    assert small.num_parameters == plain.num_parameters
    held = sum(p.numel() * p.element_size() for p in small.model.parameters())
    quarter = num_in_layers(tiny_shape(model_config())) * 3.5  # bytes saved by four bits per weight
    assert held == sum(p.numel() * 4 for p in plain.model.parameters()) - quarter


@needs_bitsandbytes
def test_a_step_is_that_of_the_weights_written_out():
    """This also holds after a forward pass without gradients, as in sampling."""
    policy = policy_of()
    dense = written_out(policy)
    torch.testing.assert_close(logits_of(policy), logits_of(dense), rtol=1e-5, atol=1e-5)
    samples = random_samples(1)
    changes = {"loss.entropy_coef": 0.1}
    loss, gradients = loss_and_gradients(policy, samples, changes)
    expected, theirs = loss_and_gradients(dense, samples, changes)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert len(gradients) == len(theirs) == 2 * 7 * 2
    for ours, other in zip(gradients, theirs, strict=True):
        assert other.any()
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())


@needs_bitsandbytes
@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
def test_it_learns_and_its_reference_does_not(autocast):
    policy = load_policy(model_config(autocast=autocast), seed=1, device=CPU)
    before = logits_of(policy)
    learner = learner_of(policy, {"optimizer.lr": 1e-2, "loss.kl.coef": 0.1})
    # the reference is the model without its adapter, so nothing is copied
    assert policy.reference == []
    samples = random_samples(1)
    losses = [learner.update(samples, step)["loss/policy"] for step in (1, 2, 3)]
    assert losses[2] < losses[0]
    after = logits_of(policy)
    assert not torch.equal(after, before)
    with policy.model.disable_adapter():
        assert torch.equal(logits_of(policy), before)
    twin = policy.twin()
    assert torch.equal(logits_of(twin), after)


@needs_bitsandbytes
def test_published_and_exported_are_the_weights_written_out(tmp_path):
    policy = policy_of()
    publication = PolicyWeights(policy)
    publication.write_weights(tmp_path / "merged")
    publication.write_base(tmp_path / "base")
    publication.write_adapter(tmp_path / "adapter")
    assert all(".lora_" in name for name in load_file(next(tmp_path.glob("adapter/*.safetensors"))))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(merged.config, "quantization_config")
    expected = logits_of(policy)
    torch.testing.assert_close(merged(TOKEN_IDS).logits, expected, rtol=1e-4, atol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with policy.model.disable_adapter():
        expected = logits_of(policy)
    torch.testing.assert_close(base(TOKEN_IDS).logits, expected, rtol=1e-4, atol=1e-4)


@needs_bitsandbytes
def test_a_checkpoint_is_the_adapter_and_is_read_to_the_bit(tmp_path):
    policy = policy_of()
    save_weights(tmp_path, policy, steps=1, warm_start_steps=0)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["adapter_model.safetensors"]
    again = load_policy(model_config(), seed=2, device=CPU, checkpoint=tmp_path)
    assert torch.equal(logits_of(again), logits_of(policy))


@needs_bitsandbytes
def test_rows_that_are_no_whole_blocks_stay_as_they_are():
    policy = load_policy(model_config(intermediate_size=96), seed=1, device=CPU)
    layer = policy.model.get_base_model().model.layers[0]
    dtypes = [x.base_layer.weight.dtype for x in (layer.mlp.down_proj, layer.mlp.up_proj)]
    assert dtypes == [torch.float32, torch.uint8]
    narrow = model_config(hidden_size=32, intermediate_size=48, num_heads=2)
    with pytest.raises(ConfigError, match="no linear layer whose inputs are a multiple of 64"):
        load_policy(narrow, seed=1, device=CPU)


# --- moments ------------------------------------------------------------------------------------

EIGHT_BITS = {"optimizer.type": "adamw_8bit", "optimizer.lr": 1e-2, "steps": 4}


@needs_bitsandbytes
def test_a_first_step_with_moments_in_eight_bits_is_adamws():
    weights = []
    for kind in ("adamw", "adamw_8bit"):
        policy = load_policy(model_config("none"), seed=1, device=CPU)
        changes = {"optimizer.type": kind, "optimizer.lr": 1e-3}
        learner = learner_of(policy, changes)
        start = [values.detach().clone() for values in trained_tensors(policy)]
        learner.update(random_samples(1), 1)
        pairs = zip(trained_tensors(policy), start, strict=True)
        weights.append(torch.cat([(now - was).detach().flatten() for now, was in pairs]))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-2, atol=1e-5)
    assert weights[0].any()


@needs_bitsandbytes
def test_large_matrices_have_their_moments_in_bytes():
    # in full training, matrices of at least 4096 weights get eight-bit moments
    model = tiny_model().model_dump() | WIDE
    policy = load_policy(run_config({"model": model}).model, seed=1, device=CPU)
    learner = learner_of(policy, EIGHT_BITS)
    learner.update(random_samples(1), 1)
    state = learner.optimizer.tensors()
    for number, (_, values) in enumerate(policy.trained_parameters()):
        is_large = values.numel() >= 4096
        for name in ("state1", "state2"):
            moment = state[f"0.{number}.{name}"]
            assert moment.dtype is (torch.uint8 if is_large else torch.float32)
            assert moment.shape == values.shape


@needs_bitsandbytes
def test_two_steps_and_two_more_are_four_steps_to_the_bit(tmp_path):
    """Trap 26, with moments in eight bits."""
    model = run_config({"model": tiny_model().model_dump() | WIDE}).model

    def learner():
        return learner_of(load_policy(model, seed=1, device=CPU), EIGHT_BITS)

    def advance(it, steps):
        for step in steps:
            it.update(random_samples(step), step)

    whole = learner()
    advance(whole, [1, 2, 3, 4])
    first = learner()
    advance(first, [1, 2])
    second = learner()
    resume_from(first, second, tmp_path)
    advance(second, [3, 4])
    ours, theirs = second.optimizer.tensors(), whole.optimizer.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    pairs = zip(trained_tensors(second.policy), trained_tensors(whole.policy), strict=True)
    assert all(torch.equal(seen, expected) for seen, expected in pairs)


# --- rejections, and memory -----------------------------------------------------------------------


def test_without_the_package_it_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"a=b needs .*pip install .*\[quantization\]'"):
        load_bitsandbytes("a=b")


@pytest.mark.parametrize(("quantization", "is_there"), [("none", True), ("nf4", False)])
def test_a_server_gets_a_hubs_model_written_out_where_it_was_rounded(quantization, is_there):
    """Otherwise the server would apply the adapter to other weights than those it was trained
    with."""
    shared = {key: tiny_model(lora_rank=4).model_dump()[key] for key in _Model.model_fields}
    hub = {"type": "hub", "path": "owner/name", "revision": None, "quantization": quantization}
    config = run_config({"model": shared | hub})
    assert (config.model.source is not None) == is_there


def test_the_memory_estimate_knows_both():
    model = tiny_model(lora_rank=4).model_dump() | WIDE
    sizes = {}
    for quantization in ("none", "nf4"):
        changes = {"model": model | {"quantization": quantization}}
        sizes[quantization] = memory_bytes(
            tiny_shape(model_config()), run_config(changes), in_one_memory=True
        )["weights"]
    num_small = num_in_layers(tiny_shape(model_config()))
    assert sizes["none"] - sizes["nf4"] == pytest.approx(num_small * (4 - 0.516), rel=1e-3)
    moments = {}
    for kind in ("adamw", "adamw_8bit"):
        config = run_config({"trainer.optimizer.type": kind})
        shape = tiny_shape(config.model)
        moments[kind] = memory_bytes(shape, config, in_one_memory=True)["optimizer"]
    assert moments["adamw"] == 8 * shape.num_parameters
    assert moments["adamw_8bit"] == pytest.approx(2.03 * shape.num_parameters, rel=1e-3)
