"""On which device the tensors of a policy on a GPU are: forward passes on a pretended GPU.

torch's FakeTensorMode runs operations without values, on devices that need not exist, and raises if
one gets tensors of different devices. Backward passes on the device `cuda` do not work without a
GPU's library; whole updates are tried on a device that is pretended altogether.
"""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fakes import CPU, random_samples, tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.config.compose import compose
from openenv_pipe.engines.sampling import sample
from openenv_pipe.learner.optimizer import Optimizer
from openenv_pipe.models.forward.attention import flex
from openenv_pipe.models.forward.row_forward import TransformersForward
from openenv_pipe.models.load import load_policy
from openenv_pipe.models.weights import PolicyWeights

CUDA = torch.device("cuda")
NUM_TOKENS = 5


class Indexing(TorchFunctionMode):
    """Does by other operations what torch itself would ask the device for."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            return indexed(*args)
        if function is torch.Tensor.__setitem__:
            values, index, new = args
            index = list(index) if isinstance(index, tuple) else [index]
            return torch.ops.aten.index_put_.default(values, index, new)
        if function is torch.Tensor.nonzero:
            (values,) = args
            return torch.zeros(NUM_TOKENS, values.ndim, dtype=torch.int64, device=values.device)
        if function is torch.Tensor.__int__:
            return NUM_TOKENS - 1  # the only number that these passes read is the last position
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            return attend(*args, **kwargs)
        if function is torch.from_numpy:
            values = function(*args)
            return torch.empty(values.shape, dtype=values.dtype)
        if function is torch.Tensor.to:
            values, *asked = args
            if asked and isinstance(asked[0], torch.Tensor):
                asked = [asked[0].dtype, asked[0].device]
            for each in asked:
                kind = "dtype" if isinstance(each, torch.dtype) else "device"
                kwargs[kind] = torch.device(each) if isinstance(each, str) else each
            wanted = {key: kwargs[key] for key in ("dtype", "device") if key in kwargs}
            return torch.ops.aten._to_copy.default(values, **wanted)
        if function is torch.Tensor.contiguous:
            return torch.ops.aten.clone.default(args[0])
        if function is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args)
        return function(*args, **kwargs)


def attend(query, key, value, attn_mask=None, enable_gqa=False, **options):
    """Attend by operations that torch can pretend."""
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    scores = query @ key.transpose(-1, -2)
    if attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, dim=-1) @ value


def indexed(values, index):
    """Return values[index] for slices, ellipses, new dimensions, numbers, tensors and masks."""
    if isinstance(index, torch.Tensor) and index.dtype is torch.bool:
        assert index.device == values.device
        return values.flatten(0, index.ndim - 1)  # as if all were chosen
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        place = parts.index(Ellipsis)
        num_missing = values.ndim - sum(part is not None for part in parts) + 1
        parts[place : place + 1] = [slice(None)] * num_missing
    dimension, tensors = 0, []
    for part in parts:
        if part is None:
            values = values.unsqueeze(dimension)
        elif isinstance(part, int):
            values = values.select(dimension, part)
            continue
        elif isinstance(part, slice):
            values = torch.ops.aten.slice.Tensor(
                values, dimension, part.start, part.stop, part.step or 1
            )
        else:
            tensors += [None] * (dimension - len(tensors)) + [part]
        dimension += 1
    return torch.ops.aten.index.Tensor(values, tensors) if tensors else values


@contextmanager
def pretended_gpu():
    """Pretend that there is a GPU."""
    shapes = ShapeEnv(allow_dynamic_output_shape_ops=True)
    with FakeTensorMode(shape_env=shapes) as mode, Indexing(), torch.no_grad():
        yield mode


@pytest.fixture
def gpu():
    with pretended_gpu() as mode:
        yield mode


def on_gpu(policy, device=CUDA):
    """Move a policy to the pretended GPU; to be called where it is pretended."""
    made = {}
    for module in policy.model.modules():
        for name, values in module._parameters.items():
            if values is not None and id(values) not in made:
                empty = torch.empty(values.shape, dtype=values.dtype, device=device)
                made[id(values)] = torch.nn.Parameter(empty, requires_grad=values.requires_grad)
            if values is not None:
                module._parameters[name] = made[id(values)]
        for name, values in module._buffers.items():
            if values is not None:
                empty = torch.empty(values.shape, dtype=values.dtype, device=device)
                module._buffers[name] = empty
    policy.device = device
    return policy


@pytest.fixture(params=[0, 4], ids=["full", "lora"])
def real(request):
    return load_policy(tiny_model(lora_rank=request.param), seed=0, device=CPU)


def test_a_mixture_of_devices_is_found(gpu):
    with pytest.raises((RuntimeError, TypeError), match=r"[Dd]evice"):
        torch.ones(3) + torch.ones(3, device=CUDA)


def test_sampling(real, gpu):
    """The local engine's passes, with their cache, and a token from the logits."""
    forward = TransformersForward(on_gpu(real))
    forward.reserve_rows(2)
    forward.feed([[1] * NUM_TOKENS] * 2, [0, 0])
    ids = torch.zeros(2, dtype=torch.int64, device=CUDA)
    logits = forward.step(ids, torch.full((2,), NUM_TOKENS, device=CUDA))
    temperatures = torch.ones(2, device=CUDA)
    ids, logprobs = sample(logits, temperatures, temperatures.double())
    assert (ids.device.type, logprobs.device.type) == ("cuda", "cuda")


def test_logprobs_of_packed_rows(real, gpu, monkeypatch):
    """With the mask of GPUs, whose kernel is not compiled here, and with padded rows."""
    policy, masks = on_gpu(real), []

    def kernel(query, key, value, *, block_mask, scale, enable_gqa, kernel_options):
        masks.append(block_mask)
        return attend(query, key, value, enable_gqa=enable_gqa)

    monkeypatch.setattr(flex, "_compiled", lambda: kernel)
    for packs_rows in (True, False):
        policy.packs_rows = packs_rows
        batch = pack(random_samples(1, count=3), share=False, device=CUDA)
        logprobs, entropies = policy.logprobs(batch, 0.7)
        assert (logprobs.device.type, entropies.device.type) == ("cuda", "cuda")
    assert {mask.kv_indices.device.type for mask in masks} == {"cuda"}


def test_publication(real, gpu):
    """With an adapter, its product is added to each matrix."""
    weights = PolicyWeights(on_gpu(real)).tensors()
    assert {each.device.type for each in weights.values()} == {"cuda"}


def test_the_optimizers_state(real, gpu):
    policy = on_gpu(real)
    config = compose(["conf=echo", "trainer.optimizer.type=adamw"]).config.trainer.optimizer
    optimizer = Optimizer(policy.trained_parameters(), config, 10, precision=torch.float32)
    for _, values in policy.trained_parameters():
        values.grad = torch.ones_like(values)
    for part in optimizer._parts:
        part.step()
    assert {each.device.type for each in optimizer.tensors().values()} == {"cuda"}


def run_module(name):
    root = Path(__file__).parents[2]
    paths = (root, root / "tests", root / "tests" / "unit")
    ended = subprocess.run(
        [sys.executable, "-m", name],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_updates_with_their_backward_passes():
    """In a process of its own: see tests/pretended_device.py."""
    run_module("tests.pretended_device")
