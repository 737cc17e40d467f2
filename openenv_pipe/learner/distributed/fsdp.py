"""FSDP2 for a policy: layers, their gradients and their optimizer state in shards, one per rank.

Embedding and head stay whole on every rank: the learner's own kernels read and write them in
place. Refused here: optimizers that need whole matrices, such as Muon.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from openenv_pipe.config.schema import OptimizerConfig
from openenv_pipe.learner.optimizer import NamedParameters, Optimizer
from openenv_pipe.learner.ranks import Ranks
from openenv_pipe.models.policy import Policy


def own_part(values: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: its shard, whose memory it shares, or all."""
    return values.to_local() if isinstance(values, DTensor) else values


def shard_like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor of the parameter's shape. Nothing is sent."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh, places = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole, mesh, places, src_data_rank=None).to_local().clone()


def gather_full(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The inverse of `shard_like`, on all ranks at once."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, [Shard(0)], shape=shape, stride=stride).full_tensor()


class ShardedPolicy(Policy):
    """The policy's model in shards. It learns; sampling and saving need the whole one."""

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        """Takes the model of `policy`, which is of no use to anyone else from then on."""
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
        """Takes whole weights, as rank 0 keeps them, and keeps this rank's part."""
        if weights is None:
            return  # rank 0 says what the reference is
        trained = [values for _, values in self.trained_parameters()]
        pairs = zip(weights, trained, strict=True) if weights else ()
        self._reference = [shard_like(whole, values) for whole, values in pairs]

    @contextlib.contextmanager
    def _lent_weights(self, weights: list[torch.Tensor]) -> Iterator[None]:
        """Copied in and out: FSDP knows the memory of its shards, and gathers no other."""
        shards = [own_part(values.detach()) for _, values in self.trained_parameters()]
        own = [shard.clone() for shard in shards]
        _copy(weights, shards)
        try:
            yield
        finally:
            _copy(own, shards)

    @torch.no_grad()
    def gather_into(self, whole: Policy | None) -> None:
        """The trained weights go to a policy that has all of them. All ranks at once; those whose
        `whole` is None only send."""
        receivers = whole.trained_parameters() if whole else [("", None)] * self._num_trained
        for (_, values), (_, receiver) in zip(self.trained_parameters(), receivers, strict=True):
            gathered = gather_full(own_part(values), values)
            if receiver is not None:
                receiver.copy_(gathered)

    @property
    def _num_trained(self) -> int:
        return len(self.trained_parameters())


class ShardedOptimizer(Optimizer):
    """AdamW on this rank's parts, which for each number is what it would be on the whole."""

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
        """The norm is that of all ranks' parts; what every rank has counts once."""
        squares = torch.zeros(2, device=self._parameters[0].device)  # of shards, of whole tensors
        for part, source in zip(self._parameters, self._sources, strict=True):
            if part.grad is not None:
                squares[0 if isinstance(source, DTensor) else 1] += part.grad.float().square().sum()
        norm = (self._ranks.sum(squares[0].clone()) + squares[1]).sqrt()
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._config.max_grad_norm, norm)
        return norm

    def tensors(self) -> dict[str, torch.Tensor]:
        """Whole, as an optimizer of one device has them, in the memory of rank 0's machine; the
        others get none. All ranks at once, one tensor after another: no device holds them all."""
        gathered = {}
        for key, part in super().tensors().items():
            whole = gather_full(part, self._source(key, part))
            if self._ranks.rank == 0:
                gathered[key] = whole.cpu()
        return gathered

    def own_part(self, key: str, whole: torch.Tensor) -> torch.Tensor:
        return shard_like(whole, self._source(key, whole))

    def _source(self, key: str, values: torch.Tensor) -> torch.Tensor:
        """The parameter in whose shape the values are; of a single number, that itself."""
        return self._sources[int(key.split(".")[1])] if values.ndim else values


def _shard(decoder: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Layers are gathered one after another, computed with, and let go of again."""
    embedding = decoder.get_input_embeddings()
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    whole = set(embedding.parameters())
    fully_shard(decoder, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    for module in (decoder, *decoder.layers):
        module.set_gradient_divide_factor(1.0)  # losses are parts of a sum already
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
