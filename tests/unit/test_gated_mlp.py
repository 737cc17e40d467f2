"""The MLP that keeps less for its gradients against transformers' own."""

import copy

import pytest
import torch
from fakes import random_samples, tiny_policy
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.models.forward import products
from openenv_pipe.models.forward.gated_mlp import GatedMlp, LastLayer, use_gated_mlps
from openenv_pipe.models.forward.products import pad_row, use_products

KINDS = [(LlamaMLP, LlamaConfig), (Qwen2MLP, Qwen2Config), (Qwen3MLP, Qwen3Config)]
HIDDEN, INTERMEDIATE = 32, 96
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def mlps(kind=Qwen3MLP, config=Qwen3Config, **changes):
    """Return transformers' MLP with our products, and the same with less kept."""
    torch.manual_seed(0)
    theirs = torch.nn.Sequential(
        kind(config(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, **changes))
    )
    use_products(theirs)
    ours = copy.deepcopy(theirs)
    use_gated_mlps(ours)
    return theirs, ours


def outputs_and_gradients(mlp, inputs):
    given = inputs.clone().requires_grad_()
    outputs = mlp(given).mul_(2.0)  # as a model may
    outputs.square().sum().backward()
    return outputs, [given.grad, *(weight.grad for weight in mlp.parameters())]


def kept_numbers(mlp, inputs):
    """Count the numbers that autograd keeps of activations."""
    weights = {weight.data_ptr() for weight in mlp.parameters()}
    kept = {}

    def note(values):
        kept[values.data_ptr()] = values.numel()
        return values

    with torch.autograd.graph.saved_tensors_hooks(note, lambda values: values):
        outputs = mlp(inputs.clone().requires_grad_())
    assert outputs.requires_grad
    return sum(number for place, number in kept.items() if place not in weights)


@pytest.mark.parametrize(("kind", "config"), KINDS)
@pytest.mark.parametrize("shape", [(5, HIDDEN), (2, 5, HIDDEN)])
def test_outputs_are_equal_and_gradients_close(kind, config, shape):
    theirs, ours = mlps(kind, config)
    assert isinstance(ours[0], GatedMlp) and isinstance(ours[0], kind)
    inputs = torch.randn(shape)
    expected, gradients = outputs_and_gradients(theirs, inputs)
    found, own = outputs_and_gradients(ours, inputs)
    assert torch.equal(found, expected)
    torch.testing.assert_close(own, gradients, **CLOSE)


def test_two_matrices_are_kept_in_place_of_four():
    theirs, ours = mlps()
    inputs = torch.randn(64, HIDDEN)  # as many rows as products have
    saved = kept_numbers(theirs, inputs) - kept_numbers(ours, inputs)
    assert saved == 2 * len(inputs) * INTERMEDIATE


def test_frozen_weights_get_no_gradient():
    theirs, ours = mlps()
    ours[0].gate_proj.requires_grad_(False)
    inputs = torch.randn(5, HIDDEN)
    _, expected = outputs_and_gradients(theirs, inputs)
    _, found = outputs_and_gradients(ours, inputs)
    assert found[1] is None
    torch.testing.assert_close([found[0], *found[2:]], [expected[0], *expected[2:]], **CLOSE)


@pytest.mark.parametrize(
    ("kind", "config", "change"),
    [(Qwen3MLP, Qwen3Config, {"hidden_act": "gelu"}), (LlamaMLP, LlamaConfig, {"mlp_bias": True})],
)
def test_another_activation_and_biases_are_left_to_transformers(kind, config, change):
    theirs, ours = mlps(kind, config, **change)
    inputs = torch.randn(5, HIDDEN)
    assert torch.equal(ours(inputs), theirs(inputs))


def test_autocast_is_left_to_transformers():
    theirs, ours = mlps()
    inputs = torch.randn(5, HIDDEN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ours(inputs), theirs(inputs))


@pytest.mark.parametrize("by_onednn", [False, True])
def test_the_last_layer_computes_read_tokens_alone(by_onednn, monkeypatch):
    """Logprobs and gradients are those of a policy that computes all tokens."""
    if by_onednn and not torch.backends.mkldnn.is_available():
        pytest.skip("torch without oneDNN")
    monkeypatch.setattr(products, "_ONEDNN_IS_FASTER", by_onednn)
    batch = pack(random_samples(3), share=True)
    num_read, num_padded = len(batch.finished), len(pad_row(batch.token_ids))
    assert num_read < len(batch.token_ids) < num_padded
    computed = []

    def outputs(mlp, inputs):
        computed.append(inputs.shape[1])
        return transformers_outputs(mlp, inputs)

    transformers_outputs = GatedMlp._outputs
    monkeypatch.setattr(GatedMlp, "_outputs", outputs)
    found = logprobs_and_gradients(tiny_policy(), batch)
    num_others = num_padded if by_onednn else len(batch.token_ids)
    assert computed == [num_others] * (len(computed) - 1) + [num_read]
    policy = tiny_policy()
    last = policy.decoder.layers[-1]
    assert isinstance(last, LastLayer)
    last.__class__ = type(last).__mro__[2]  # transformers' own
    expected = logprobs_and_gradients(policy, batch)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_row_that_predicts_nothing_leaves_gradients_of_zero():
    policy = tiny_policy()
    mlp = policy.decoder.layers[-1].mlp
    mlp.read = torch.empty(0, dtype=torch.int64)
    inputs = torch.randn(1, 5, policy.decoder.config.hidden_size)
    outputs = mlp(inputs)
    assert torch.equal(outputs, torch.zeros_like(inputs))
    outputs.sum().backward()
    assert all(not weight.grad.any() for weight in mlp.parameters())


def test_passes_without_a_packed_row_compute_all_tokens():
    policy = tiny_policy()
    ids = torch.arange(1, 9)[None]
    expected = policy.hidden(ids)
    policy.row_hidden(pack(random_samples(3), share=True))
    assert torch.equal(policy.hidden(ids), expected)


def logprobs_and_gradients(policy, batch):
    logprobs, _ = policy.logprobs(batch, 1.0)
    logprobs.sum().backward()
    return [logprobs, *(weight.grad for weight in policy.model.parameters())]
