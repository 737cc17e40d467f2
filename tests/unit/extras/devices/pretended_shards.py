"""Update sharded policies on a pretended device, as `tests/pretended_device.py` updates whole ones.

A process of its own too.
"""

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.distributed.fake_pg import FakeStore

from openenv_pipe.config.compose import compose
from openenv_pipe.extras.devices import fsdp, learner_group
from openenv_pipe.extras.devices.ranks import ConnectedRanks
from openenv_pipe.models.load import load_policy
from tests.fakes import CPU, random_samples, tiny_model
from tests.pretended_device import NAME, Numbers, pretend
from tests.unit.test_device_placement import on_gpu


class Event:
    """An event of the pretended device, where everything has happened already."""

    def __init__(self, *arguments, **options):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass


class Stream:
    """A stream of the pretended device, of which FSDP uses several."""

    def __init__(self, *arguments, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return Event()


class RecordingOptimizer(fsdp.ShardedOptimizer):
    """Keeps the gradients of the parameters, which a step drops."""

    def step(self):
        self.gradients = [source.grad for source in self._sources]
        return super().step()


def update_shards(lora_rank: int, mesh: DeviceMesh) -> None:
    """Update the first rank's shards of a policy; nothing comes from the second rank."""
    fsdp.init_device_mesh = lambda *arguments, **options: mesh  # it reads values of tensors
    learner_group.ShardedOptimizer = RecordingOptimizer
    whole, ranks = (
        load_policy(tiny_model(lora_rank=lora_rank), seed=0, device=CPU),
        ConnectedRanks(0, 2),
    )
    shape_env = ShapeEnv(allow_dynamic_output_shape_ops=True)
    with FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True), Numbers():
        device = torch.device(NAME)
        root = fsdp.shard(on_gpu(whole, device).model, ranks, device, num_replicas=1)
        policy = fsdp.ShardedPolicy(
            root,
            ranks,
            whole.chat,
            device=device,
            autocast=torch.float32,
            activation_checkpointing=False,
        )
        policy.packs_rows = True
        given = ("trainer.devices=2", "trainer.parallel=fsdp", "trainer.optimizer.type=adamw")
        config = compose(["conf=echo", *given]).config
        learner = learner_group.ShardedLearner(policy, config, ranks)
        assert "loss/policy" in learner.update(random_samples(1, count=3), 1)
        state = learner.optimizer.tensors()
    gradients = learner.optimizer.gradients
    assert len(gradients) == len(policy.trained_parameters()) > 0
    assert all(isinstance(each, DTensor) for each in gradients)
    assert {each.device.type for each in (*gradients, *state.values())} == {NAME}


def main() -> None:
    pretend()
    torch.pretended.Stream, torch.pretended.Event = Stream, Event
    torch.pretended.stream = lambda stream: stream
    torch.pretended.current_stream = lambda *arguments: Stream()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh(NAME, (2,), mesh_dim_names=("shard",))
    ConnectedRanks.gather = lambda self, value: [value] * self.size
    for lora_rank in (0, 4):
        update_shards(lora_rank, mesh)


if __name__ == "__main__":
    main()
