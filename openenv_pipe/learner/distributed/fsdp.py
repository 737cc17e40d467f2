"""FSDP2 for a policy: each rank holds a shard of the layers, their gradients and optimizer state.

Embedding and head are replicated on every rank, because the learner's own kernels read and write
them in place. Optimizers that need whole matrices, such as Muon, are not supported.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from openenv_pipe.config.schema import OptimizerConfig
from openenv_pipe.learner.optimizer import NamedParameters, Optimizer
from openenv_pipe.learner.ranks import Ranks
from openenv_pipe.models.policy import Policy


def own_part(values: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, which shares memory; a replicated tensor is returned whole."""
    return values.to_local() if isinstance(values, DTensor) else values


def shard_like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Cut this rank's shard out of a full tensor like the parameter; no communication."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh, places = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole, mesh, places, src_data_rank=None).to_local().clone()


def gather_full(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor from all shards. A collective: every rank must call it."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, [Shard(0)], shape=shape, stride=stride).full_tensor()


class ShardedPolicy(Policy):
    """A policy whose model is sharded. It is trained; sampling and saving need the full policy."""

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        """Shard the model of `policy` in place; `policy` must not be used afterwards."""
        super().__init__(
            policy.model,
            policy.tokenizer,
            device=policy.device,
            autocast=policy._autocast,
            activation_checkpointing=bool(policy._checkpointed),
        )
        self.packs_rows = policy.packs_rows
        _shard(self.decoder, init_device_mesh(self.device.type, (ranks.size,)))

    def keep_reference(self, weights: list[torch.Tensor] | None = None) -> None:
        """Keep this rank's shards of the full reference weights."""
        if weights is None:
            return  # rank 0 sends the reference later
        trained = [values for _, values in self.trained_parameters()]
        pairs = zip(weights, trained, strict=True) if weights else ()
        self._reference = [shard_like(whole, values) for whole, values in pairs]

    @contextlib.contextmanager
    def _lent_weights(self, weights: list[torch.Tensor]) -> Iterator[None]:
        """Copy `weights` in, and back at the end: FSDP gathers only memory that it manages."""
        shards = [own_part(values.detach()) for _, values in self.trained_parameters()]
        own = [shard.clone() for shard in shards]
        _copy(weights, shards)
        try:
            yield
        finally:
            _copy(own, shards)

    @torch.no_grad()
    def gather_into(self, whole: Policy | None) -> None:
        """Copy the trained weights into the full policy `whole`; None: this rank only sends.

        A collective: every rank must call it.
        """
        receivers = whole.trained_parameters() if whole else [("", None)] * self._num_trained
        for (_, values), (_, receiver) in zip(self.trained_parameters(), receivers, strict=True):
            gathered = gather_full(own_part(values), values)
            if receiver is not None:
                receiver.copy_(gathered)

    @property
    def _num_trained(self) -> int:
        return len(self.trained_parameters())


class ShardedOptimizer(Optimizer):
    """AdamW on this rank's shards; AdamW is elementwise, so the result is that of one device."""

    def __init__(
        self, parameters: NamedParameters, config: OptimizerConfig, num_steps: int, ranks: Ranks
    ) -> None:
        assert config.type == "adamw", config.type
        self._sources = [parameter for _, parameter in parameters]
        self._ranks = ranks
        parts = [(name, torch.nn.Parameter(own_part(p.detach()))) for name, p in parameters]
        super().__init__(parts, config, num_steps)

    def step(self) -> float:
        for part, source in zip(self._parameters, self._sources, strict=True):
            part.grad = None if source.grad is None else own_part(source.grad)
            source.grad = None
        return super().step()

    def _clip(self) -> torch.Tensor:
        """Clip by the norm over all ranks' shards; replicated parameters count once."""
        squares = torch.zeros(2, device=self._parameters[0].device)  # sharded, replicated
        for part, source in zip(self._parameters, self._sources, strict=True):
            if part.grad is not None:
                squares[0 if isinstance(source, DTensor) else 1] += part.grad.float().square().sum()
        norm = (self._ranks.sum(squares[0].clone()) + squares[1]).sqrt()
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._config.max_grad_norm, norm)
        return norm

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the full state in CPU memory on rank 0, nothing on others. A collective.

        Tensors are gathered one at a time, because all of them may not fit on a device.
        """
        gathered = {}
        for key, part in super().tensors().items():
            whole = gather_full(part, self._source(key, part))
            if self._ranks.rank == 0:
                gathered[key] = whole.cpu()
        return gathered

    def own_part(self, key: str, whole: torch.Tensor) -> torch.Tensor:
        return shard_like(whole, self._source(key, whole))

    def _source(self, key: str, values: torch.Tensor) -> torch.Tensor:
        """Return the parameter that has the shape of `values`; for a scalar, the scalar itself."""
        return self._sources[int(key.split(".")[1])] if values.ndim else values


def _shard(decoder: Any, mesh: DeviceMesh) -> None:
    """Apply FSDP to each layer, which is gathered for its computation and then resharded."""
    embedding = decoder.get_input_embeddings()
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    whole = set(embedding.parameters())
    fully_shard(decoder, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    for module in (decoder, *decoder.layers):
        module.set_gradient_divide_factor(1.0)  # each rank's loss is already its part of the sum
        module.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
