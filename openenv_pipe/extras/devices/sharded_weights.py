"""Publish a sharded policy: files are written by all ranks, and tensors gathered one at a time."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import Linear

from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.devices.fsdp import (
    ShardedPolicy,
    as_shard_of,
    gather,
    own_part,
    shard_like,
    write_model,
)
from openenv_pipe.extras.devices.ranks import ConnectedRanks, collective
from openenv_pipe.models.weights import PolicyWeights, made_up_values
from openenv_pipe.system.out_of_memory import PUBLISHING

OUT_OF_MEMORY_STAGE = PUBLISHING


class WholeOnDemand:
    """A tensor of the published policy, with its type and shape; gathered when it is sent."""

    def __init__(self, whole: "ShardedPolicyWeights", name: str, like: torch.Tensor) -> None:
        self.dtype, self.shape, self.device = like.dtype, like.shape, like.device
        self._whole = whole
        self._name = name

    def full_tensor(self) -> torch.Tensor:
        return self._whole.gathered(self._name)


class ShardedPolicyWeights(PolicyWeights):
    """Publishes a sharded policy without holding all of it anywhere."""

    def __init__(self, policy: ShardedPolicy, ranks: ConnectedRanks) -> None:
        super().__init__(policy)
        self._sharded = policy
        self._ranks = ranks
        self._own: list[torch.Tensor] = []  # shards of the adapter while others are in their place

    def write_base(self, folder: Path) -> None:
        self.write_shards(folder, False)
        self._policy.save_tokenizer(folder)

    def write_weights(self, folder: Path) -> None:
        self.write_shards(folder, True)

    @collective("weights")
    def write_shards(self, folder: Path, with_adapter: bool) -> None:
        weights = self._sharded.named_shards()
        self.check_names(weights)
        if with_adapter:
            weights = {name: self._merged(name, part) for name, part in weights.items()}
        write_model(self._base, weights, folder, self._ranks)

    def tensors(self) -> Mapping[str, Any]:
        shards = self._sharded.named_shards()
        self.check_names(shards)
        return {name: WholeOnDemand(self, name, values) for name, values in shards.items()}

    @collective("weights")
    def gathered(self, name: str) -> torch.Tensor:
        return gather(self._merged(name, self._sharded.named_shards()[name]))

    @collective("weights")
    def write_adapter(self, folder: Path) -> None:
        adapter = self._sharded.whole_adapter()
        if self._ranks.rank == 0:
            self.write_adapter_of(folder, adapter)

    @contextlib.contextmanager
    def _probe_adapter(self, size: float) -> Iterator[None]:
        self.install_probe_adapter(size)
        try:
            yield
        finally:
            self.remove_probe_adapter()

    @collective("weights")
    def install_probe_adapter(self, size: float) -> None:
        trained = [values for _, values in self._policy.trained_parameters()]
        self._own = [own_part(values.detach()).clone() for values in trained]
        shapes = [values.shape for values in trained]
        for values, made_up in zip(trained, made_up_values(shapes, size), strict=True):
            part = own_part(values.detach())
            part.copy_(shard_like(made_up.to(part), values))

    @collective("weights")
    def remove_probe_adapter(self) -> None:
        for (_, values), own in zip(self._policy.trained_parameters(), self._own, strict=True):
            own_part(values.detach()).copy_(own)
        self._own = []

    @torch.no_grad()
    def _merged(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Add this rank's part of an adapter's product to its part of a matrix. A collective.

        Raises ConfigError: the adapter of this module is not a product of two matrices.
        """
        layer = self._adapted.get(name)
        if layer is None:
            return part
        if type(layer) is not Linear:
            raise ConfigError(
                f"engine.publish=merged with trainer.parallel=fsdp cannot merge {name} "
                f"({type(layer).__name__}); set engine.publish=adapter"
            )
        matrices: list[Any] = [layer.lora_A["default"], layer.lora_B["default"]]
        first, second = (gather(each.weight.detach()) for each in matrices)
        product = (second @ first) * layer.scaling["default"]
        if layer.fan_in_fan_out:
            product = product.t().contiguous()
        own = own_part(part)
        return as_shard_of(part, (own.float() + shard_like(product, part).float()).to(own))
