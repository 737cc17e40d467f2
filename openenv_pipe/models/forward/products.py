"""Matrix products and embeddings that take less time or memory than torch's own.

Of float32 on AMD's processors with AVX-512, products are by oneDNN, which is twice as fast there as
MKL, the library that torch leaves them to. Other processors are faster with MKL: on one of Intel's
with AVX-512, weight gradients take half of the time and all others nine tenths, and forward and
backward of SmolLM2-135M three quarters (torch 2.13).

oneDNN also multiplies bfloat16 on a CPU, by torch's own functions. Its products are computed from
rows that are padded (`pad_rows`).

The gradient of an embedding is added only to the rows in use. torch's own backward pass makes a
matrix of the whole vocabulary, which for small models is most of their memory. Here, and in
`logprobs.py`, the parameter's gradient is updated in place.

Shape letters: N tokens, I inputs, O outputs.
"""

from collections.abc import Callable
from typing import Any

import torch

from openenv_pipe.system.process import cpu_model


def _onednn_is_faster() -> bool:
    """Return whether oneDNN multiplies float32 faster on this processor than torch itself does."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return torch.backends.mkldnn.is_available()
    return "AMD" in cpu_model() and torch.backends.cpu.get_cpu_capability() == "AVX512"


_ONEDNN_IS_FASTER = _onednn_is_faster()


def product(inputs: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Return the outputs [..., O] of inputs [..., I], without a gradient."""
    if is_by_onednn(inputs, weight_OI):
        return _by_onednn(inputs, weight_OI, None)
    if _is_compiled(inputs):
        return padded(inputs, lambda rows_NI: rows_NI @ weight_OI.t()).data
    return inputs @ weight_OI.t()


def weight_gradient(gradient_NO: torch.Tensor, inputs_NI: torch.Tensor) -> torch.Tensor:
    """Return the gradient [O, I] of the matrix whose product with the inputs has this gradient."""
    if _is_compiled(gradient_NO):
        return pad_rows(gradient_NO).t() @ pad_rows(inputs_NI)
    if not is_by_onednn(gradient_NO, inputs_NI):
        return gradient_NO.t() @ inputs_NI
    gradient_NO, inputs_NI = pad_rows(gradient_NO), pad_rows(inputs_NI)
    # oneDNN copies both into another order; for the second one it is quicker.
    if gradient_NO.shape[1] > inputs_NI.shape[1]:
        return _onednn_linear(inputs_NI.t(), gradient_NO.t(), None).t()
    return _onednn_linear(gradient_NO.t(), inputs_NI.t(), None)


def is_float32_on_cpu(*values: torch.Tensor) -> bool:
    return all(
        each.dtype is torch.float32 and each.device.type == "cpu" and each.numel()
        for each in values
    )


def is_by_onednn(*values: torch.Tensor) -> bool:
    """Return whether these values are multiplied by oneDNN's function for float32."""
    return _ONEDNN_IS_FASTER and is_float32_on_cpu(*values)


def pads_rows(device: torch.device, precision: torch.dtype) -> bool:
    """Return whether products there and in this precision are computed from padded rows."""
    return device.type == "cpu" and (precision is not torch.float32 or _ONEDNN_IS_FASTER)


def _is_compiled(values: torch.Tensor) -> bool:
    """Return whether torch's own product of these values is by a kernel of oneDNN."""
    return values.dtype is torch.bfloat16 and values.device.type == "cpu"


def _by_onednn(
    inputs: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """Return outputs that modules may change in place: `data`, not a view of padded rows."""
    return padded(inputs, lambda rows_NI: _onednn_linear(rows_NI, weight_OI, bias_O)).data


def _onednn_linear(
    inputs: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, weight_OI, bias_O, "none", [], "")


def padded(inputs: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the outputs [..., O] of a product of inputs [..., I], computed from `pad_rows`."""
    shape, rows_NI = inputs.shape[:-1], pad_rows(inputs)
    outputs_NO = multiply(rows_NI)
    if len(rows_NI) > shape.numel():  # a slice's gradient is a copy, also where it is the whole
        outputs_NO = outputs_NO[: shape.numel()]
    return outputs_NO.reshape(*shape, -1)


def pad_rows(inputs: torch.Tensor) -> torch.Tensor:
    """Return inputs [..., I] as rows [N, I], padded with zeros to one of few numbers of rows.

    oneDNN compiles a kernel of up to 1 MB for each number of rows, and never frees it. Batches
    differ in their rows, so memory would grow at each step. At most an eighth or 15 rows are added.
    """
    rows_NI = inputs.reshape(-1, inputs.shape[-1])
    num_added = _num_added(len(rows_NI))
    return torch.nn.functional.pad(rows_NI, (0, 0, 0, num_added)) if num_added else rows_NI


def pad_row(values_T: torch.Tensor) -> torch.Tensor:
    """Return a row of tokens with the zeros that `pad_rows` would otherwise add in each layer."""
    return torch.nn.functional.pad(values_T, (0, _num_added(len(values_T))))


def _num_added(num_rows: int) -> int:
    return -num_rows % max(16, 1 << max(num_rows.bit_length() - 4, 0))


class Linear(torch.nn.Linear):
    """A linear layer with these products, forward and backward."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        is_autocast = inputs.device.type == "cpu" and torch.is_autocast_enabled("cpu")
        if is_autocast or _is_compiled(inputs):
            return padded(inputs, super().forward)
        if is_by_onednn(inputs, self.weight):
            return _Linear.apply(inputs, self.weight, self.bias)
        return super().forward(inputs)


def use_products(model: torch.nn.Module) -> None:
    """Let all plain linear layers of a model use these products; their weights stay the same."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = Linear


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight_OI)
        return _by_onednn(inputs, weight_OI, bias_O)

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        inputs, weight_OI = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        of_inputs = _by_onednn(gradient, weight_OI.t(), None) if needs_inputs else None
        gradient_NO = gradient.flatten(0, -2)
        of_weight = weight_gradient(gradient_NO, inputs.flatten(0, -2)) if needs_weight else None
        return of_inputs, of_weight, gradient_NO.sum(dim=0) if needs_bias else None


def embed(embedding: torch.nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """Look up the ids; a module that does more than look up is called as it is."""
    is_plain = type(embedding) is torch.nn.Embedding and not embedding._forward_hooks
    if is_plain and isinstance(weight := embedding.weight, torch.Tensor) and adds_in_place(weight):
        return _Rows.apply(weight, token_ids, embedding.padding_idx)
    return embedding(token_ids)


def adds_in_place(weight: torch.Tensor) -> bool:
    """True if the parameter's `grad` may be written directly: autograd does not need it."""
    return weight.requires_grad and weight.is_leaf and not weight._backward_hooks


def gradient_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the parameter's gradient, made of zeros if there is none."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, token_ids: torch.Tensor, padding_id: int | None
    ) -> torch.Tensor:
        ctx.weight, ctx.padding_id = weight, padding_id
        ctx.save_for_backward(token_ids)
        return torch.nn.functional.embedding(token_ids, weight.detach())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        (token_ids,) = ctx.saved_tensors
        rows, ids = grad.flatten(0, -2), token_ids.flatten()
        if ctx.padding_id is not None:  # As in torch, the padding token's embedding never learns.
            rows = rows.masked_fill((ids == ctx.padding_id)[:, None], 0.0)
        gradient_of(ctx.weight).index_add_(0, ids, rows.to(ctx.weight.dtype))
        return None, None, None
