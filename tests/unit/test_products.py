"""Matrix products by oneDNN equal torch's own, forward and backward."""

import copy
from itertools import product as combinations

import pytest
import torch

from openenv_pipe.models.forward import products
from openenv_pipe.models.forward.products import Linear as FastLinear
from openenv_pipe.models.forward.products import (
    is_by_onednn,
    is_float32_on_cpu,
    pad_row,
    pad_rows,
    product,
    use_products,
    weight_gradient,
)

SIZES = [1, 7, 128, 300]
CLOSE = {"rtol": 1e-5, "atol": 1e-4}
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch without oneDNN"
)


def use_onednn(monkeypatch, by_onednn=True):
    """Let oneDNN multiply float32, or not, whatever is faster on this machine."""
    value = by_onednn and torch.backends.mkldnn.is_available()
    monkeypatch.setattr(products, "_ONEDNN_IS_FASTER", value)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), list(combinations(SIZES, SIZES)))
@pytest.mark.parametrize("by_onednn", [False, True])
def test_products_are_torchs_own(num_inputs, num_outputs, by_onednn, monkeypatch):
    use_onednn(monkeypatch, by_onednn)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(33, num_inputs, generator=generator)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    gradient = torch.randn(33, num_outputs, generator=generator)
    torch.testing.assert_close(product(inputs, weight), inputs @ weight.t(), **CLOSE)
    torch.testing.assert_close(product(gradient, weight.t()), gradient @ weight, **CLOSE)
    torch.testing.assert_close(weight_gradient(gradient, inputs), gradient.t() @ inputs, **CLOSE)


@needs_onednn
@pytest.mark.parametrize(
    ("name", "capability", "by_onednn"),
    [
        ("AMD EPYC 9B14", "AVX512", True),
        ("AMD EPYC 7B13", "AVX2", False),
        ("Intel(R) Xeon(R) Processor", "AVX512", False),
    ],
)
def test_the_processor_decides_which_library_multiplies(name, capability, by_onednn, monkeypatch):
    monkeypatch.setattr(products, "cpu_model", lambda: name)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert products._onednn_is_faster() == by_onednn or not torch.backends.mkl.is_available()


@needs_onednn
@pytest.mark.parametrize("by_onednn", [False, True])
def test_a_linear_layer_is_multiplied_by_what_is_faster(by_onednn, monkeypatch):
    use_onednn(monkeypatch, by_onednn)
    torch.manual_seed(0)
    plain = torch.nn.Linear(60, 50)
    fast = copy.deepcopy(plain)
    use_products(torch.nn.Sequential(fast))
    with torch.profiler.profile() as profile:
        outputs = fast(torch.ones(48, 60, requires_grad=True))
        outputs.sum().backward()
    names = [event.name for event in profile.events()]
    # The outputs, and the gradients of the inputs and the weight.
    assert names.count("mkldnn::_linear_pointwise") == (3 if by_onednn else 0)
    assert ("aten::mm" in names) == (not by_onednn)
    given = torch.ones(48, 60)
    plain(given).sum().backward()
    torch.testing.assert_close(outputs, plain(given), **CLOSE)
    torch.testing.assert_close(fast.weight.grad, plain.weight.grad, **CLOSE)


@pytest.mark.parametrize("by_onednn", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 24), (2, 5, 24), (0, 24)])
def test_a_linear_layer_has_the_outputs_and_gradients_of_torchs(
    has_bias, shape, by_onednn, monkeypatch
):
    """Also where a model changes the outputs in place, as Gemma 3n and Llama 4 do."""
    use_onednn(monkeypatch, by_onednn)
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


def test_other_precisions_are_torchs_own(monkeypatch):
    use_onednn(monkeypatch)
    layer = torch.nn.Linear(8, 4)
    use_products(torch.nn.Sequential(layer))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(3, 8)).dtype is torch.bfloat16
    weight = torch.randn(4, 8, dtype=torch.bfloat16)
    assert not is_by_onednn(weight) and not is_float32_on_cpu(weight)
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


@needs_onednn
def test_onednn_multiplies_few_numbers_of_rows(monkeypatch):
    use_onednn(monkeypatch)
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
