"""Matrix products by oneDNN equal torch's own, forward and backward."""

import copy
from itertools import product as combinations

import pytest
import torch

from openenv_pipe.models.forward import products
from openenv_pipe.models.forward.products import Linear as FastLinear
from openenv_pipe.models.forward.products import (
    is_by_onednn,
    pad_row,
    pad_rows,
    product,
    use_products,
    weight_gradient,
)

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


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("has_avx2_alone", [False, True])
def test_large_matrices_are_multiplied_by_what_is_faster_on_the_processor(
    has_avx2_alone, monkeypatch
):
    monkeypatch.setattr(products, "_HAS_AVX2_ALONE", has_avx2_alone)
    torch.manual_seed(0)
    plain = torch.nn.Linear(600, 500)
    fast = copy.deepcopy(plain)
    use_products(torch.nn.Sequential(fast))
    with torch.profiler.profile() as profile:
        outputs = fast(torch.ones(48, 600, requires_grad=True))
        outputs.sum().backward()
    names = {event.name for event in profile.events()}
    assert ("mkldnn::_linear_pointwise" in names) == (not has_avx2_alone)
    given = torch.ones(48, 600)
    plain(given).sum().backward()
    torch.testing.assert_close(outputs, plain(given), **CLOSE)
    torch.testing.assert_close(fast.weight.grad, plain.weight.grad, **CLOSE)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_small_matrices_are_multiplied_by_onednn_however_many_rows_there_are(monkeypatch):
    monkeypatch.setattr(products, "_HAS_AVX2_ALONE", True)
    layer = torch.nn.Linear(64, 128, bias=False)
    use_products(torch.nn.Sequential(layer))
    with torch.profiler.profile() as profile:
        layer(torch.ones(8192, 64, requires_grad=True)).sum().backward()
    names = [event.name for event in profile.events()]
    assert names.count("mkldnn::_linear_pointwise") == 3  # outputs, gradients of inputs and weight
    assert "aten::addmm" not in names and "aten::mm" not in names


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 24), (2, 5, 24), (0, 24)])
def test_a_linear_layer_has_the_outputs_and_gradients_of_torchs(has_bias, shape):
    """Also where a model changes the outputs in place, as Gemma 3n and Llama 4 do."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(24, 40, bias=has_bias)
    fast = copy.deepcopy(plain)
    use_products(torch.nn.Sequential(fast))
    assert type(fast) is FastLinear
    found = []
    inputs = torch.randn(shape)
    for layer in (plain, fast):
        given = inputs.clone().requires_grad_()
        outputs = layer(given).mul_(2.0)
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


def test_rows_are_padded_to_few_numbers():
    """For each of them oneDNN keeps a compiled kernel."""
    numbers = {pad_rows(torch.ones(num_rows, 2)).shape[0] for num_rows in range(1, 8193)}
    assert len(numbers) == 56
    for num_rows in (1, 15, 16, 129, 1000, 8000):
        padded = pad_rows(torch.ones(1, num_rows, 2))
        assert padded.sum() == 2 * num_rows
        assert num_rows <= padded.shape[0] <= max(16, num_rows * 9 / 8)
        assert len(pad_row(torch.ones(num_rows))) == padded.shape[0]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_onednn_multiplies_few_numbers_of_rows():
    weight, shapes = torch.ones(4, 8), set()
    layer = torch.nn.Linear(8, 4)
    use_products(torch.nn.Sequential(layer))
    with torch.profiler.profile(record_shapes=True) as profile:
        for num_rows in range(1000, 1065, 16):
            layer(torch.ones(num_rows, 8)).sum().backward()
            product(torch.ones(num_rows, 8), weight)
    for event in profile.events():
        if "_linear_pointwise" in event.name:
            shapes.add(tuple(event.input_shapes[0]))
    assert {max(shape) for shape in shapes} == {1024, 1152}


def test_bfloat16_weights_multiply_few_numbers_of_rows():
    layer, shapes = torch.nn.Linear(8, 4, dtype=torch.bfloat16), set()
    use_products(torch.nn.Sequential(layer))
    with torch.profiler.profile(record_shapes=True) as profile:
        for num_rows in range(1000, 1065, 16):
            layer(torch.ones(num_rows, 8, dtype=torch.bfloat16))
    for event in profile.events():
        if event.name == "aten::addmm":
            shapes.add(tuple(event.input_shapes[1]))
    assert {max(shape) for shape in shapes} == {1024, 1152}


def test_padded_products_have_the_outputs_and_gradients_of_torchs():
    own = torch.nn.Linear(8, 4)
    padded = copy.deepcopy(own)
    use_products(torch.nn.Sequential(padded))
    inputs, outputs = torch.randn(2, 21, 8), []
    for layer in (own, padded):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(layer(inputs))
        outputs[-1].float().square().sum().backward()
    assert outputs[1].shape == (2, 21, 4)
    torch.testing.assert_close(outputs[0], outputs[1])
    for name in ("weight", "bias"):
        torch.testing.assert_close(getattr(own, name).grad, getattr(padded, name).grad)
    rows, gradient = torch.randn(21, 8).bfloat16(), torch.randn(21, 4).bfloat16()
    weight = torch.randn(4, 8).bfloat16()
    torch.testing.assert_close(product(rows, weight), rows @ weight.t())
    torch.testing.assert_close(weight_gradient(gradient, rows), gradient.t() @ rows)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_float32_on_a_cpu_is_multiplied_by_onednn():
    assert is_by_onednn(torch.ones(2, 2))
    with torch.profiler.profile() as profile:
        product(torch.ones(3, 8), torch.ones(4, 8))
    assert any("_linear_pointwise" in event.key for event in profile.key_averages())
