"""Muon: torch's steps in bfloat16, and the same directions in the precision of the products."""

import pytest
import torch
from fakes import random_samples, run_config, tiny_policy

from openenv_pipe.learner.learner import Learner
from openenv_pipe.learner.muon import Muon, orthogonalised

SHAPES = [(8, 8), (32, 8), (8, 32)]


def parameters_after(build, num_steps=3):
    """Return matrices after steps along gradients that are the same for each optimizer."""
    draw = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]
    optimizer = build(parameters)
    for _ in range(num_steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.step()
    return parameters


def own(precision):
    return lambda parameters: Muon(parameters, lr=0.1, weight_decay=0.01, precision=precision)


def of_torch(parameters):
    return torch.optim.Muon(parameters, lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")


def test_in_bfloat16_the_steps_are_those_of_torch_to_the_bit():
    assert all(map(torch.equal, parameters_after(own(torch.bfloat16)), parameters_after(of_torch)))


def test_in_float32_the_steps_differ_from_those_of_torch_by_rounding():
    start = parameters_after(of_torch, num_steps=0)
    ends = parameters_after(own(torch.float32)), parameters_after(of_torch)
    for before, exact, rounded in zip(start, *ends, strict=True):
        assert not torch.equal(exact, rounded)
        assert (exact - rounded).norm() < 0.1 * (rounded - before).norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_become_nearly_one_and_singular_vectors_stay(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    turned = u.T @ orthogonalised(matrix) @ vh.T
    assert ((turned.diag() > 0.6) & (turned.diag() < 1.3)).all()
    assert (turned - turned.diag().diag()).abs().max() < 1e-9


@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
def test_the_learner_orthogonalises_in_the_precision_of_its_products(monkeypatch, autocast):
    seen = []

    def noted(matrix):
        seen.append(matrix.dtype)
        return orthogonalised(matrix)

    monkeypatch.setattr("openenv_pipe.learner.muon.orthogonalised", noted)
    policy = tiny_policy(autocast=autocast)
    trainer = run_config({"trainer.optimizer.type": "muon"}).trainer
    learner = Learner(policy, trainer, max_episode_tokens=120, seed=0)
    learner.update(random_samples(1), 1)
    assert set(seen) == {getattr(torch, autocast)}
