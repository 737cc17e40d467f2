"""MLPs that compute and keep less in an update than transformers' modules.

Of the last layer only the tokens that predict a trained token are read, so that its MLP leaves out
the others of a packed row, and its attention on a CPU leaves out most of their queries.

In float32 on a CPU, all MLPs keep half as much for their gradients. Autograd keeps four matrices of
the intermediate size, which are most of a small model's memory in an update. These MLPs keep two
and compute the others again, which takes no matrix product. Their outputs are those of
transformers' modules to the bit. With adapters or biases, or in another precision or on another
device, transformers' modules compute them.

Shape letters: T tokens of a row, U of them predict, H hidden size, I intermediate size.
"""

from typing import Any

import torch
from torch.nn.functional import silu

from openenv_pipe.models.forward.attention.packed import PackedRow
from openenv_pipe.models.forward.products import (
    Linear,
    is_by_onednn,
    is_float32_on_cpu,
    padded,
    product,
    weight_gradient,
)

_KINDS = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP")
_ACTIVATIONS = ("SiLU", "SiLUActivation")


def use_gated_mlps(model: torch.nn.Module) -> None:
    """Let the MLPs of known architectures be these; their weights stay the same."""
    for module in model.modules():
        if type(module).__name__ in _KINDS and not isinstance(module, GatedMlp):
            _add_base(module, GatedMlp)


def leave_out_unread_tokens(decoder: Any) -> None:
    """Let the last layer of a decoder use its MLP only for tokens that are read, if it can."""
    last = decoder.layers[-1] if hasattr(decoder, "layers") else None
    if isinstance(getattr(last, "mlp", None), GatedMlp) and not isinstance(last, LastLayer):
        _add_base(last, LastLayer)


def _add_base(module: Any, base: type[torch.nn.Module]) -> None:
    """Let a module be of a subclass of its class and of `base`, with the same name."""
    subclass: Any = type(type(module).__name__, (base, type(module)), {})
    module.__class__ = subclass


class LastLayer(torch.nn.Module):
    """The last layer of a decoder; the other base class is transformers' module."""

    mlp: "GatedMlp"

    def forward(
        self, *inputs: Any, packed_row: PackedRow | None = None, **options: Any
    ) -> torch.Tensor:
        if packed_row is not None:
            packed_row = packed_row.of_last_layer()
        self.mlp.read = None if packed_row is None else packed_row.read
        return super().forward(*inputs, packed_row=packed_row, **options)


class GatedMlp(torch.nn.Module):
    """down(silu(gate(x)) * up(x)); the other base class is transformers' module."""

    read: torch.Tensor | None = None  # int64: the tokens whose outputs are read; None: all

    gate_proj: Any  # a linear layer, or peft's layer around one
    up_proj: Any
    down_proj: Any
    act_fn: torch.nn.Module

    def forward(self, inputs: torch.Tensor) -> Any:
        if self.read is None:
            return self._outputs(inputs)
        outputs_1UH = self._outputs(inputs.index_select(1, self.read))
        unread_1TH = outputs_1UH.new_zeros(inputs.shape)
        return unread_1TH.index_copy(1, self.read, outputs_1UH)

    def _outputs(self, inputs: torch.Tensor) -> Any:
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        weights = [each.weight for each in layers if type(each) is Linear and each.bias is None]
        if (
            len(weights) == len(layers)
            and type(self.act_fn).__name__ in _ACTIVATIONS
            and is_float32_on_cpu(inputs, *weights)
            and not torch.is_autocast_enabled("cpu")
        ):
            if not is_by_onednn(inputs):
                return _GatedMlp.apply(inputs.flatten(0, -2), *weights).view(inputs.shape)
            # Padded here, the wide matrices in between are not copied to be padded.
            return padded(inputs, lambda rows_NH: _GatedMlp.apply(rows_NH, *weights))
        return super().forward(inputs)


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs_NH: torch.Tensor,
        gate_IH: torch.Tensor,
        up_IH: torch.Tensor,
        down_HI: torch.Tensor,
    ) -> torch.Tensor:
        gate_NI, up_NI = product(inputs_NH, gate_IH), product(inputs_NH, up_IH)
        ctx.save_for_backward(inputs_NH, gate_NI, up_NI, gate_IH, up_IH, down_HI)
        return product(silu(gate_NI).mul_(up_NI), down_HI)

    @staticmethod
    def backward(ctx: Any, gradient_NH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs_NH, gate_NI, up_NI, gate_IH, up_IH, down_HI = ctx.saved_tensors
        needs_inputs, needs_gate, needs_up, needs_down = ctx.needs_input_grad
        activated_NI, work_NI = silu(gate_NI), torch.empty_like(gate_NI)
        of_inputs = of_gate = of_up = of_down = None
        if needs_down:
            torch.mul(activated_NI, up_NI, out=work_NI)
            of_down = weight_gradient(gradient_NH, work_NI)
        of_product_NI = product(gradient_NH, down_HI.t())
        of_gated_NI = torch.mul(of_product_NI, up_NI, out=work_NI)
        up_gradient_NI = activated_NI.mul_(of_product_NI)
        gate_gradient_NI = torch.ops.aten.silu_backward.grad_input(
            of_gated_NI, gate_NI, grad_input=of_product_NI
        )
        if needs_inputs:
            of_inputs = product(gate_gradient_NI, gate_IH.t())
            of_inputs += product(up_gradient_NI, up_IH.t())
        if needs_gate:
            of_gate = weight_gradient(gate_gradient_NI, inputs_NH)
        if needs_up:
            of_up = weight_gradient(up_gradient_NI, inputs_NH)
        return of_inputs, of_gate, of_up, of_down
