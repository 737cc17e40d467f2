"""Matrix products by oneDNN equal torch's own, forward and backward."""

import copy
from itertools import product as combinations

import pytest
import torch

from openenv_pipe.models.products import Linear as FastLinear
from openenv_pipe.models.products import is_by_onednn, product, use_products, weight_gradient

SIZES = [1, 7, 128, 300]
CLOSE = {"rtol": 1e-5, "atol": 1e-4}


@pytest.mark.parametrize(("num_inputs", "num_outputs"), list(combinations(SIZES, SIZES)))
def test_products_are_torchs_own(num_inputs, num_outputs):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(33, num_inputs, generator=generator)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    gradient = torch.randn(33, num_outputs, generator=generator)
    torch.testing.assert_close(product(inputs, weight), inputs @ weight.t(), **CLOSE)
    torch.testing.assert_close(product(gradient, weight.t()), gradient @ weight, **CLOSE)
    torch.testing.assert_close(weight_gradient(gradient, inputs), gradient.t() @ inputs, **CLOSE)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 24), (2, 5, 24), (0, 24)])
def test_a_linear_layer_has_the_outputs_and_gradients_of_torchs(has_bias, shape):
    torch.manual_seed(0)
    plain = torch.nn.Linear(24, 40, bias=has_bias)
    fast = copy.deepcopy(plain)
    use_products(torch.nn.Sequential(fast))
    assert type(fast) is FastLinear
    found = []
    inputs = torch.randn(shape)
    for layer in (plain, fast):
        given = inputs.clone().requires_grad_()
        outputs = layer(given)
        outputs.square().sum().backward()
        found.append([outputs, given.grad, *(each.grad for each in layer.parameters())])
    torch.testing.assert_close(found[0], found[1], **CLOSE)


def test_frozen_weights_get_no_gradient():
    layer = torch.nn.Linear(8, 4)
    use_products(torch.nn.Sequential(layer))
    layer.requires_grad_(False)
    given = torch.randn(3, 8, requires_grad=True)
    layer(given).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is None
    torch.testing.assert_close(given.grad, layer.weight.sum(dim=0).expand(3, -1), **CLOSE)


def test_other_precisions_are_torchs_own():
    layer = torch.nn.Linear(8, 4)
    use_products(torch.nn.Sequential(layer))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(3, 8)).dtype is torch.bfloat16
    weight = torch.randn(4, 8, dtype=torch.bfloat16)
    assert not is_by_onednn(weight)
    assert product(torch.randn(3, 8, dtype=torch.bfloat16), weight).dtype is torch.bfloat16


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_float32_on_a_cpu_is_multiplied_by_onednn():
    assert is_by_onednn(torch.ones(2, 2))
    with torch.profiler.profile() as profile:
        product(torch.ones(3, 8), torch.ones(4, 8))
    assert any("_linear_pointwise" in event.key for event in profile.key_averages())
