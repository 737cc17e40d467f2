"""On which device the tensors of a sharded policy on GPUs are: a forward pass on pretended GPUs.

A rank of four has a process group that sends nothing. Without a GPU's library torch cannot make the
nodes of a backward pass for a weight, so the weights are frozen here; `pretended_shards.py` has
whole updates.
"""

import importlib
import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from fakes import random_samples, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.extras.devices import fsdp
from openenv_pipe.extras.devices.fsdp import ShardedPolicy, own_part
from openenv_pipe.extras.devices.ranks import ConnectedRanks
from openenv_pipe.extras.devices.sharded_load import _fill
from openenv_pipe.models import policy as policies
from openenv_pipe.models.forward.attention import flex
from openenv_pipe.models.forward.attention.packed import use_packed_attention
from openenv_pipe.models.forward.logit_transform import UNCHANGED
from openenv_pipe.models.load import build_empty, load_chat
from tests.unit.test_device_placement import CUDA, attend, pretended_gpu, run_module

ASKERS = ("_fsdp_param_group", "_fsdp_collectives", "_fsdp_state", "_fsdp_init")


class Stream:
    """A stream, or an event, of a pretended GPU: nothing has to be waited for."""

    def __init__(self, *arguments, **options):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record(self, stream=None):
        pass

    def record_event(self):
        return Stream()


class Gpus:
    """What FSDP asks of torch.cuda."""

    Stream = Event = Stream

    def current_stream(self):
        return Stream()

    def stream(self, stream):
        return nullcontext()

    def current_device(self):
        return 0


@pytest.fixture
def ranks(monkeypatch):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    for name in ASKERS:
        module = importlib.import_module(f"torch.distributed.fsdp._fully_shard.{name}")
        monkeypatch.setattr(module, "_get_device_handle", lambda device_type: Gpus())
    yield ConnectedRanks(0, 4)
    dist.destroy_process_group()


def test_logprobs_of_a_sharded_policy(ranks, monkeypatch):
    """Weights are gathered on the GPU."""

    def kernel(query, key, value, *, block_mask, scale, enable_gqa, kernel_options):
        assert block_mask.kv_indices.device.type == "cuda"
        return attend(query, key, value, enable_gqa=enable_gqa)

    monkeypatch.setattr(flex, "_compiled", lambda: kernel)
    # logits of a pretended GPU have no numbers
    monkeypatch.setattr(policies, "measure_logit_transform", lambda model, decoder: UNCHANGED)
    mesh = init_device_mesh("cuda", (ranks.size,), mesh_dim_names=("shard",))  # of real numbers
    monkeypatch.setattr(fsdp, "init_device_mesh", lambda *given, **names: mesh)
    model = build_empty(tiny_model()).requires_grad_(False)
    use_packed_attention(model)
    monkeypatch.setattr(type(model), "to", lambda self, device: self)  # it is there already
    with pretended_gpu() as mode:
        mode.allow_non_fake_inputs = True  # the model without values, on `meta`
        root = fsdp.shard(model, ranks, CUDA, num_replicas=1)
        for module in model.modules():
            for name, values in module._buffers.items():
                module._buffers[name] = torch.empty(values.shape, dtype=values.dtype, device=CUDA)
        _fill(root, CUDA)
        chat = load_chat(tiny_model())
        policy = ShardedPolicy(root, ranks, chat, device=CUDA, autocast=torch.float32)
        batch = pack(random_samples(1, count=3), share=False, device=CUDA)
        logprobs, entropies = policy.logprobs(batch, 0.7)
    assert (logprobs.device.type, entropies.device.type) == ("cuda", "cuda")
    weights = list(root.parameters())
    assert {own_part(each).device.type for each in weights} == {"cuda"}
    assert all(len(own_part(each)) == math.ceil(len(each) / ranks.size) for each in weights)


def test_updates_of_shards_with_their_backward_passes():
    """In a process of its own: see pretended_shards.py."""
    run_module("tests.unit.extras.devices.pretended_shards")
