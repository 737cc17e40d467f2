"""The fused head against autograd on the whole matrix of logits, in values and gradients."""

import pytest
import torch

from openenv_pipe.models.forward import logprobs as module
from openenv_pipe.models.forward.logit_transform import UNCHANGED, LogitTransform
from openenv_pipe.models.forward.logprobs import token_logprobs
from openenv_pipe.models.forward.products import embed

ROWS, HIDDEN, VOCABULARY = 7, 5, 23


@pytest.fixture(params=[10**6, 0])
def chunks(request, monkeypatch):
    """Chunks of four ids, which are kept for the backward pass or computed again."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(module, "KEPT_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(module, "MIN_COLUMNS", 4)
    monkeypatch.setattr(module, "KEPT_ELEMENTS", request.param)


class PlusOne(torch.nn.Linear):
    """A head that does more than multiply by a matrix."""

    def forward(self, hidden):
        return super().forward(hidden) + 1.0


def by_autograd(hidden, targets, head, temperature, transform=UNCHANGED):
    logprobs = torch.log_softmax(transform(head(hidden)) / temperature, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


def numbers_and_gradients(found, given):
    logprobs, entropies = found
    weights = torch.linspace(-1.0, 2.0, ROWS)
    total = (logprobs * weights).sum()
    if entropies.requires_grad:
        total = total + (entropies * weights.flip(0)).sum()
    total.backward()
    gradients = [tensor.grad for tensor in given]
    for tensor in given:
        tensor.grad = None
    return [logprobs, entropies, *gradients]


TRANSFORMS = [UNCHANGED, LogitTransform(0.25), LogitTransform(1.0, 0.8), LogitTransform(3.0, 1.5)]


@pytest.mark.parametrize("kind", [torch.nn.Linear, PlusOne])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_numbers_and_gradients_are_autograds(
    chunks, kind, bias, temperature, transform, entropy_gradient
):
    torch.manual_seed(0)
    head = kind(HIDDEN, VOCABULARY, bias=bias)
    hidden = torch.randn(ROWS, HIDDEN, requires_grad=True)
    targets = torch.tensor([0, 3, 4, 22, 11, 11, 19])
    given = [hidden, *head.parameters()]
    found = token_logprobs(
        hidden,
        targets,
        head=head,
        transform=transform,
        temperature=temperature,
        precision=torch.float32,
        entropy_gradient=entropy_gradient,
    )
    assert found[1].requires_grad == entropy_gradient
    expected = by_autograd(hidden, targets, head, temperature, transform)
    if not entropy_gradient:
        expected = (expected[0], expected[1].detach())
    for seen, value in zip(
        numbers_and_gradients(found, given), numbers_and_gradients(expected, given), strict=True
    ):
        assert torch.allclose(seen, value, atol=1e-5)


def test_gradients_add_up_in_a_tied_matrix():
    """The gradients of embedding and head add up over two batches, as with torch's own
    operations."""
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    embedding = torch.nn.Embedding(VOCABULARY, HIDDEN, padding_idx=3)
    embedding.weight = head.weight
    ids, targets = torch.tensor([5, 3, 5, 0, 7, 8, 9]), torch.tensor([0, 3, 4, 22, 11, 11, 19])
    options = {"temperature": 1.0, "precision": torch.float32, "entropy_gradient": False}
    for _ in range(2):
        token_logprobs(embed(embedding, ids), targets, head=head, **options)[0].sum().backward()
    seen, head.weight.grad = head.weight.grad, None
    for _ in range(2):
        by_autograd(embedding(ids), targets, head, 1.0)[0].sum().backward()
    assert torch.allclose(seen, head.weight.grad, atol=1e-5)


@pytest.mark.parametrize("chunk", ["CHUNK_ELEMENTS", "KEPT_CHUNK_ELEMENTS"])
def test_no_stretch_is_larger_than_its_bound(monkeypatch, chunk):
    """A bound on the chunks keeps memory from growing with the vocabulary."""
    sizes = []
    take_in = module._take_in
    monkeypatch.setattr(
        module,
        "_take_in",
        lambda logits, *sums: sizes.append(logits.numel()) or take_in(logits, *sums),
    )
    monkeypatch.setattr(module, chunk, 2000)
    monkeypatch.setattr(module, "KEPT_ELEMENTS", 10**6 if chunk.startswith("KEPT") else 0)
    monkeypatch.setattr(module, "MIN_COLUMNS", 2)
    head = torch.nn.Linear(HIDDEN, 5000)
    token_logprobs(
        torch.randn(ROWS, HIDDEN),
        torch.zeros(ROWS, dtype=torch.int64),
        head=head,
        temperature=1.0,
        precision=torch.float32,
        entropy_gradient=False,
    )
    assert max(sizes) <= 2000
    assert sum(sizes) == ROWS * 5000


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_frozen_head_gets_no_gradient(requires_grad):
    head = torch.nn.Linear(HIDDEN, VOCABULARY).requires_grad_(requires_grad)
    hidden = torch.randn(ROWS, HIDDEN, requires_grad=True)
    logprobs, _ = token_logprobs(
        hidden,
        torch.zeros(ROWS, dtype=torch.int64),
        head=head,
        temperature=1.0,
        precision=torch.float32,
        entropy_gradient=False,
    )
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert (head.weight.grad is not None) == requires_grad
