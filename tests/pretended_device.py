"""Update policies on a device that torch pretends, with backward passes and the optimizer.

A process of its own, because it gives the process a device for good: torch's `privateuse1`, written
in Python. Unlike the device `cuda` of a torch without CUDA it has what a backward pass needs. Code
that asks for `cuda` by name takes the way of another device here.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from openenv_pipe.config.compose import compose
from openenv_pipe.learner import learner as learners
from openenv_pipe.learner.token_recorder import TokenRecorder
from openenv_pipe.models.forward.attention import flex
from openenv_pipe.models.load import load_policy
from tests.fakes import CPU, random_samples, tiny_model
from tests.unit.test_device_placement import attend, on_gpu

NAME = "pretended"
KINDS = {
    torch.Tensor.__bool__: bool,
    torch.Tensor.__float__: float,
    torch.Tensor.__int__: int,
    torch.Tensor.item: float,
    torch.equal: bool,
}


class Numbers(TorchFunctionMode):
    """Gives a number where the value of a tensor is asked for, as pretended tensors have none."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in KINDS:
            return KINDS[function](1)
        if function is torch.Tensor.tolist:
            return [1.0] * args[0].numel()
        kwargs = kwargs or {}
        if function is torch.tensor:  # which would fill the memory of the device
            device = kwargs.pop("device", "cpu")
            return function(*args, **kwargs).to(device)
        return function(*args, **kwargs)


class WrongDevice(torch.autograd.Function):
    """A function whose backward pass multiplies tensors of two devices."""

    @staticmethod
    def forward(ctx, values):
        return values * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.full(gradient.shape, 2.0)


def kernel(query, key, value, *, block_mask, scale, enable_gqa, kernel_options):
    """Attend in the place of the kernel of GPUs, which is not compiled here."""
    assert block_mask.kv_indices.device.type == NAME
    return attend(query, key, value, enable_gqa=enable_gqa)


def update(lora_rank: int, *, packs_rows: bool) -> None:
    """Update a policy and check where its gradients and the optimizer's state are."""
    policy = load_policy(tiny_model(lora_rank=lora_rank), seed=0, device=CPU)
    gradients: list[torch.Tensor] = []
    with FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True)), Numbers():
        on_gpu(policy, torch.device(NAME))
        policy.packs_rows = packs_rows
        trained = policy.trained_parameters()
        for _, values in trained:
            values.register_hook(lambda gradient: gradients.append(gradient) or None)
        trainer = compose(["conf=echo", "trainer.optimizer.type=adamw"]).config.trainer
        learner = learners.Learner(policy, trainer, max_episode_tokens=64, seed=0)
        metrics = learner.update(random_samples(1, count=3), 1)
        assert "loss/policy" in metrics
        state = learner.optimizer.tensors()
    assert len(gradients) >= len(trained) > 0
    assert {each.device.type for each in (*gradients, *state.values())} == {NAME}


def find_a_mistake() -> None:
    """Check that a mixture of devices in a backward pass is found at all."""
    with FakeTensorMode():
        values = torch.ones(3, device=NAME, requires_grad=True)
        with pytest.raises(RuntimeError, match="at least two devices, pretended:0 and cpu"):
            WrongDevice.apply(values).sum().backward()


def pretend() -> None:
    """Let torch have the device, and the learner ask for no values of tensors."""
    _setup_privateuseone_for_python_backend(NAME)
    torch.pretended.get_amp_supported_dtype = lambda: [torch.bfloat16]
    flex._compiled = lambda: kernel
    learners._reject_broken = lambda samples: None  # it reads values
    TokenRecorder.collected = lambda self, ranks: []  # it reads values too, on the CPU


def main() -> None:
    pretend()
    find_a_mistake()
    for lora_rank in (0, 4):
        for packs_rows in (True, False):
            update(lora_rank, packs_rows=packs_rows)


if __name__ == "__main__":
    main()
