"""FSDP2 for a policy: each rank holds a shard of all weights, gradients and optimizer state.

With `trainer.replicas` above 1 (HSDP), the ranks form that number of groups. Each group holds all
shards: weights are gathered within a group, and the groups add up their gradients.

The layers are gathered one after another. Embedding, last norm and head are gathered together
while a batch is computed, because the learner's own kernels read and write them in place.
Optimizers that need whole matrices, such as Muon, are not supported.

All ranks have the same objects. Rank 0 lets the others call the methods that are collectives
(`collective`). While rank 0 plays or compares logprobs, the others only help to gather weights.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from openenv_pipe.algorithms.batch import Batch
from openenv_pipe.config.schema import OptimizerConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.devices.ranks import ConnectedRanks, collective
from openenv_pipe.extras.devices.shard_files import (
    read_shapes,
    read_shards,
    write_gathered,
    write_shards,
)
from openenv_pipe.learner.optimizer import NamedParameters, Optimizer
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.forward.forward_check import check_forward
from openenv_pipe.models.policy import Policy
from openenv_pipe.models.safetensors_only import ADAPTER, plain_name
from openenv_pipe.system.files import naming

Result = TypeVar("Result")
WEIGHTS = "model.safetensors"


def own_part(values: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, sharing its memory, or a tensor that is not sharded as it is."""
    return values.to_local() if isinstance(values, DTensor) else values


def shard_like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Cut this rank's shard out of a full tensor like the parameter, without communication."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh, places = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole, mesh, places, src_data_rank=None).to_local().clone()


def as_shard_of(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Wrap this rank's part of a tensor that is sharded like the parameter."""
    assert isinstance(parameter, DTensor)
    mesh, places = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, places, shape=shape, stride=stride)


def gather(values: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor of which the ranks hold shards. A collective."""
    return values.full_tensor() if isinstance(values, DTensor) else values


class Root(torch.nn.Module):
    """The outermost module of a sharded model; calls a function while its weights are gathered."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Result]) -> Result:
        return function()


def shard(model: Any, ranks: ConnectedRanks, device: torch.device, *, num_replicas: int) -> Root:
    """Shard a model's weights over the ranks. Those on torch's device `meta` stay without values.

    num_replicas: groups of ranks that each hold all shards; a divisor of the number of ranks.

    Each layer is gathered for its computation. The weights outside of layers are gathered with
    the root, so that a head that is tied to the embedding stays one tensor with it.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    root, layers = Root(model), list(inner.get_decoder().layers)
    dims = {"replicate": num_replicas, "shard": ranks.size // num_replicas}
    if num_replicas == 1:
        del dims["replicate"]
    mesh = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(root, mesh=mesh, reshard_after_forward=False)
    for module in (root, *layers):
        module.set_gradient_divide_factor(1.0)  # each rank's loss is already its part of the sum
        module.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction
    return root


class ShardedPolicy(Policy):
    """A policy of which each rank holds a shard. It is trained, and plays with all ranks' help."""

    samplers = Policy.samplers[1:]  # the fast forward pass copies whole weights

    def __init__(self, root: Any, ranks: ConnectedRanks, chat: ChatFormat, **options: Any) -> None:
        """root: from `shard`, with values. options: those of `Policy`. A collective."""
        self._root = root
        self._ranks = ranks
        self._is_gathered = False
        super().__init__(root.model, chat, **options)
        # FSDP keeps tensors from the first pass, which must not be those of inference mode.
        self.pass_along()

    @torch.no_grad()
    def pass_along(self) -> None:
        """Do a forward pass without a result, to help gather the weights for rank 0's."""
        token_ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._gathered(partial(super().hidden, token_ids))

    @torch.no_grad()
    def pass_along_head(self) -> None:
        """Help gather the weights outside of layers."""
        self._gathered(lambda: None)

    def hidden(self, *arguments: Any, **options: Any) -> torch.Tensor:
        with self._ranks.joined("policy.pass_along"):
            return self._gathered(partial(super().hidden, *arguments, **options))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with self._ranks.joined("policy.pass_along_head"):
            return self._gathered(partial(super().logits, hidden))

    def model_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        with self._ranks.joined("policy.pass_along"):
            return self._gathered(partial(super().model_logits, token_ids))

    def predicted_logprobs(
        self, batch: Batch, temperature: float, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do as `Policy.predicted_logprobs`. A collective: each rank has a batch of its own."""
        return self._gathered(partial(super().predicted_logprobs, batch, temperature, **options))

    def _gathered(self, function: Callable[[], Result]) -> Result:
        """Call a function while the weights outside of layers are gathered.

        With gradients, they stay gathered until the backward pass is over.
        """
        if self._is_gathered:
            return function()
        self._is_gathered = True
        try:
            return self._root(function)
        finally:
            self._is_gathered = False
            if not torch.is_grad_enabled():
                self._root.reshard()

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """Do as `Policy._precision`, but keep no rounded weights of earlier layers."""
        if self._autocast is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast, cache_enabled=False)

    @collective("policy")
    def check_forward(self, max_tokens: int) -> str | None:
        return check_forward(self, max_tokens)

    @collective("policy")
    def whole(self, name: str) -> torch.Tensor:
        return gather(self.model.get_parameter(name).detach())

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, values in self.model.state_dict().items():
            yield name, self.whole(name) if isinstance(values, DTensor) else values

    @collective("policy")
    def save_model(self, folder: Path) -> None:
        if hasattr(self.model, "peft_config"):
            adapter = self.whole_adapter()
            if self._ranks.rank == 0:
                self.model.save_pretrained(folder, state_dict=adapter)
        else:
            write_model(self.model, self.named_shards(), folder, self._ranks)

    @collective("policy")
    def load_model(self, folder: Path) -> None:
        if hasattr(self.model, "peft_config"):
            self.load_adapter(load_file(folder / ADAPTER))
        else:
            read_shards(self.named_shards(), folder)

    def named_shards(self) -> dict[str, torch.Tensor]:
        """Return the weights as files name them, sharded; tied weights once."""
        return {
            plain_name(name.removeprefix("base_model.model.")): values.detach()
            for name, values in self.model.named_parameters()
            if ".lora_" not in name
        }

    def whole_adapter(self) -> dict[str, torch.Tensor]:
        """Gather the adapter, which is small. A collective."""
        return {name: gather(values.detach()) for name, values in self.trained_parameters()}

    @torch.no_grad()
    def load_adapter(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's shards of an adapter, whose tensors are named as peft saves them."""
        for name, values in self.trained_parameters():
            whole = saved.get(name.replace(".default.", "."))
            if whole is None or whole.shape != values.shape:
                raise ConfigError(
                    f"the adapter has no tensor {name} of shape {list(values.shape)}; it is of "
                    "another model, or of other values of model.lora"
                )
            own_part(values).copy_(shard_like(whole.to(self.device), values))

    def keep_reference(self, weights: list[torch.Tensor] | None = None) -> None:
        """Keep this rank's shards, of the present weights or of full ones. A collective."""
        trained = [values for _, values in self.trained_parameters()]
        if weights is not None:
            pairs = zip(weights, trained, strict=True) if weights else ()
            self._reference = [shard_like(whole, values) for whole, values in pairs]
        elif self._adapter_is_nothing():
            self._reference = []
        else:
            self._reference = [own_part(values.detach()).clone() for values in trained]

    def _adapter_is_nothing(self) -> bool:
        trained = self.trained_parameters()
        if not all("lora_" in name for name, _ in trained):
            return False
        own = [own_part(values.detach()) for name, values in trained if "_B." in name]
        num_nonzero = sum(int(values.count_nonzero()) for values in own)
        return not self._ranks.sum(torch.tensor([num_nonzero], device=self.device)).item()

    @collective("policy")
    def save_reference(self, file: Path) -> None:
        write_shards(self._named_reference(), file)

    @collective("policy")
    def load_reference(self, file: Path) -> None:
        num_saved = sum(name.isdecimal() for name in read_shapes(file.parent))
        trained = [values for _, values in self.trained_parameters()][:num_saved]
        self._reference = [torch.empty_like(own_part(values.detach())) for values in trained]
        read_shards(self._named_reference(), file.parent)

    def _named_reference(self) -> dict[str, torch.Tensor]:
        assert self._reference is not None
        trained = [values for _, values in self.trained_parameters()]
        pairs = zip(trained, self._reference, strict=False)
        return {str(number): as_shard_of(*pair) for number, pair in enumerate(pairs)}

    @contextlib.contextmanager
    def lent_weights(self, weights: Sequence[torch.Tensor]) -> Iterator[None]:
        """Copy `weights` in, and back at the end: FSDP gathers only memory that it manages."""
        shards = [own_part(values.detach()) for _, values in self.trained_parameters()]
        own = [shard.clone() for shard in shards]
        _copy(weights, shards)
        try:
            yield
        finally:
            _copy(own, shards)


class ShardedOptimizer(Optimizer):
    """AdamW on this rank's shards; AdamW is elementwise, so the result is that of one device."""

    def __init__(
        self,
        parameters: NamedParameters,
        config: OptimizerConfig,
        num_steps: int,
        ranks: ConnectedRanks,
    ) -> None:
        assert config.type == "adamw", config.type
        self._sources = [parameter for _, parameter in parameters]
        self._ranks = ranks
        first: torch.Tensor = parameters[0][1]
        assert isinstance(first, DTensor)
        self._num_replicas = first.device_mesh.size() // first.device_mesh.size(-1)
        parts = [(name, torch.nn.Parameter(own_part(p.detach()))) for name, p in parameters]
        super().__init__(parts, config, num_steps, precision=torch.float32)

    def step(self) -> float:
        for part, source in zip(self._parameters, self._sources, strict=True):
            part.grad = None if source.grad is None else own_part(source.grad)
            source.grad = None
        return super().step()

    def _clip(self) -> torch.Tensor:
        square = torch.zeros((), device=self._parameters[0].device)
        for part in self._parameters:
            if part.grad is not None:
                square += part.grad.float().square().sum()
        norm = (self._ranks.sum(square) / self._num_replicas).sqrt()  # each shard counts once
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._config.max_grad_norm, norm)
        return norm

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all state, sharded like the parameters; counters are equal on all ranks."""
        own = super().tensors()
        return {key: self._as_shard(key, part) if part.ndim else part for key, part in own.items()}

    @collective("optimizer")
    def save(self, file: Path) -> None:
        if tensors := self.tensors():
            write_shards(tensors, file)

    @collective("optimizer")
    def load_file(self, file: Path, num_steps_taken: int) -> None:
        shapes = read_shapes(file.parent)
        state: dict[str, torch.Tensor] = {}
        for key in [key for key in shapes if key.count(".") == 2]:  # others are the reference's
            part = self._parameters[int(key.split(".")[1])]
            zeros = torch.zeros_like(part.detach()) if shapes[key] else part.new_zeros(())
            state[key] = self._as_shard(key, zeros) if shapes[key] else zeros
        read_shards(state, file.parent)
        self.load({key: own_part(values) for key, values in state.items()}, num_steps_taken)

    def _as_shard(self, key: str, part: torch.Tensor) -> torch.Tensor:
        return as_shard_of(self._sources[int(key.split(".")[1])], part)


def write_model(
    model: Any, weights: Mapping[str, torch.Tensor], folder: Path, ranks: ConnectedRanks
) -> None:
    """Write a transformers model's configuration, and sharded weights. A collective.

    The folder has to be on the machine of rank 0. Where all ranks see it, each writes its part.
    """
    if ranks.rank == 0:
        with naming(folder):
            model.save_pretrained(folder, state_dict={})
    ranks.gather(None)  # by now the folder is there
    if all(ranks.gather(folder.is_dir())):
        write_shards(weights, folder / WEIGHTS)
    else:
        write_gathered(weights, folder / WEIGHTS, ranks)


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
