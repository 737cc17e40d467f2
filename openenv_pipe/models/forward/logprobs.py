"""Logprobs and entropies of chosen tokens without a matrix of all their logits.

The head's product runs over one stretch of the vocabulary at a time. If logits are few, they are
kept for the backward pass; otherwise they are computed again there. All sums are float32, whatever
the precision of the product, which is the sampler's.

Shape letters: U chosen tokens, H hidden size, V vocabulary, C a stretch of it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from openenv_pipe.models.forward.logit_transform import UNCHANGED, LogitTransform
from openenv_pipe.models.forward.products import (
    Linear,
    adds_in_place,
    gradient_of,
    is_by_onednn,
    product,
    weight_gradient,
)

CHUNK_ELEMENTS = 1 << 18  # U x C logits at a time, if there are many, which fit a CPU's cache
KEPT_ELEMENTS = 1 << 22  # up to this many logits (U x V) are kept for the backward pass,
KEPT_CHUNK_ELEMENTS = 1 << 20  # in chunks of this many
GPU_ELEMENTS = 1 << 27  # in place of all three on a GPU, whose kernels have to be long: 512 MiB
MIN_COLUMNS = 256


def token_logprobs(
    hidden_UH: torch.Tensor,
    targets_U: torch.Tensor,
    *,
    head: torch.nn.Module,
    transform: LogitTransform = UNCHANGED,
    temperature: float,
    precision: torch.dtype,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each target's logprob [U] at the temperature, and the distribution's entropy [U].

    transform: what the model makes of its head's outputs.

    Both are float32. The entropy has a gradient only if `entropy_gradient`.
    """
    if type(head) in (torch.nn.Linear, Linear) and not head._forward_hooks:
        # z * scale / temperature; the temperature divides the cap too.
        heat = temperature / transform.scale
        cap = None if transform.cap is None else transform.cap / temperature
        return _Fused.apply(
            hidden_UH, head.weight, head.bias, targets_U, heat, cap, precision, entropy_gradient
        )
    logprobs, entropies = [], []
    for hidden, targets in zip(
        hidden_UH.split(MIN_COLUMNS), targets_U.split(MIN_COLUMNS), strict=True
    ):
        part = checkpoint(
            _any_head, hidden, targets, head, transform, temperature, precision, use_reentrant=False
        )
        logprobs.append(part[0])
        entropies.append(part[1] if entropy_gradient else part[1].detach())
    return torch.cat(logprobs), torch.cat(entropies)


def _any_head(
    hidden_UH: torch.Tensor,
    targets_U: torch.Tensor,
    head: torch.nn.Module,
    transform: LogitTransform,
    temperature: float,
    precision: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute both by autograd, for heads that are more than one matrix."""
    enabled = precision is not torch.float32
    with torch.autocast(hidden_UH.device.type, dtype=precision, enabled=enabled):
        logits_UV = transform(head(hidden_UH))
    logprobs_UV = torch.log_softmax(logits_UV.float() / temperature, dim=-1)
    entropy_U = -(logprobs_UV.exp() * logprobs_UV).sum(dim=-1)
    return logprobs_UV.gather(1, targets_U[:, None])[:, 0], entropy_U


class _Fused(torch.autograd.Function):
    """Logprobs and entropies of one linear head.

    The gradient of a logit z of row u, at temperature 1, is

        g_u (1[target] - p)  -  h_u p (log p + entropy_u)

    for gradients g of the logprobs and h of the entropies. A cap, z = cap tanh(x / cap), makes it
    1 - (z / cap)^2 of that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_UH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_U: torch.Tensor,
        temperature: float,
        cap: float | None,
        precision: torch.dtype,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept, few, many = KEPT_ELEMENTS, KEPT_CHUNK_ELEMENTS, CHUNK_ELEMENTS
        if hidden_UH.device.type != "cpu":
            kept = few = many = GPU_ELEMENTS
        fits = len(hidden_UH) * len(weight_VH) <= kept
        at_once = few if fits else many
        ctx.head = _Head(hidden_UH, weight_VH, bias_V, temperature, cap, precision, at_once)
        keeps = fits and any(ctx.needs_input_grad[:3])
        highest_U = hidden_UH.new_full((len(hidden_UH),), -torch.inf, dtype=torch.float32)
        total_U, moment_U, target_U = (torch.zeros_like(highest_U) for _ in range(3))
        ctx.kept = {}
        for columns in ctx.head.stretches():
            logits_UC = ctx.head.logits(columns)
            if keeps:
                ctx.kept[columns.start] = logits_UC
            is_here_U, places_U1 = _inside(targets_U, columns)
            target_U = torch.where(is_here_U, logits_UC.gather(1, places_U1)[:, 0], target_U)
            _take_in(logits_UC, highest_U, total_U, moment_U)
        lse_U = highest_U + total_U.log()
        entropy_U = lse_U - moment_U / total_U
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_U)
        ctx.weight = weight_VH
        ctx.save_for_backward(hidden_UH, bias_V, targets_U, lse_U, entropy_U)
        return target_U - lse_U, entropy_U

    @staticmethod
    def backward(ctx: Any, grad_U: torch.Tensor, entropy_grad_U: torch.Tensor) -> tuple[Any, ...]:
        hidden_UH, bias_V, targets_U, lse_U, entropy_U = ctx.saved_tensors
        weight_VH = ctx.weight.detach()
        head, needs = ctx.head, ctx.needs_input_grad
        hidden_grad = torch.zeros_like(hidden_UH, dtype=torch.float32) if needs[0] else None
        in_place = needs[1] and adds_in_place(ctx.weight)
        weight_grad = None
        if needs[1]:
            weight_grad = gradient_of(ctx.weight) if in_place else torch.zeros_like(weight_VH)
        bias_grad = torch.empty_like(bias_V) if needs[2] else None
        for columns in head.stretches():
            logits_UC = ctx.kept.pop(columns.start, None)
            logits_UC = head.logits(columns) if logits_UC is None else logits_UC
            slope_UC = None if head.cap is None else 1.0 - (logits_UC / head.cap).square_()
            logprobs_UC = logits_UC.sub_(lse_U[:, None])
            factor_U1 = -grad_U[:, None]
            if ctx.entropy_gradient:
                surprise_UC = logprobs_UC + entropy_U[:, None]
                factor_U1 = factor_U1 - entropy_grad_U[:, None] * surprise_UC
            delta_UC = logprobs_UC.exp_().mul_(factor_U1)
            is_here_U, places_U1 = _inside(targets_U, columns)
            delta_UC.scatter_add_(1, places_U1, (is_here_U * grad_U)[:, None])
            if slope_UC is not None:
                delta_UC.mul_(slope_UC)
            if head.temperature != 1.0:
                delta_UC.div_(head.temperature)
            head.backward(delta_UC, columns, hidden_grad, weight_grad, bias_grad)
        hidden_grad = None if hidden_grad is None else hidden_grad.to(hidden_UH.dtype)
        return hidden_grad, None if in_place else weight_grad, bias_grad, *[None] * 5


class _Head:
    """The linear head and its gradients, one stretch of the vocabulary at a time."""

    def __init__(
        self,
        hidden_UH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        temperature: float,
        cap: float | None,
        precision: torch.dtype,
        num_at_once: int,
    ) -> None:
        self.temperature, self.cap = temperature, cap
        self._num_columns = max(MIN_COLUMNS, num_at_once // max(1, len(hidden_UH)))
        self._dtype = weight_VH.dtype if precision is torch.float32 else precision
        self._hidden_UH = hidden_UH.to(self._dtype)
        self._weight_VH, self._bias_V = weight_VH.detach(), bias_V

    def stretches(self) -> Iterator[slice]:
        for start in range(0, len(self._weight_VH), self._num_columns):
            yield slice(start, min(start + self._num_columns, len(self._weight_VH)))

    def logits(self, columns: slice) -> torch.Tensor:
        """Return the logits [U, C] in float32, divided by the temperature, then capped."""
        weight_CH = self._weight_VH[columns].to(self._dtype)
        logits_UC = product(self._hidden_UH, weight_CH).float()
        if self._bias_V is not None:
            logits_UC += self._bias_V[columns]
        if self.temperature != 1.0:
            logits_UC.div_(self.temperature)
        if self.cap is not None:
            logits_UC.div_(self.cap).tanh_().mul_(self.cap)
        return logits_UC

    def backward(
        self,
        delta_UC: torch.Tensor,
        columns: slice,
        hidden_grad: torch.Tensor | None,
        weight_grad: torch.Tensor | None,
        bias_grad: torch.Tensor | None,
    ) -> None:
        rounded_UC = delta_UC.to(self._dtype)
        if hidden_grad is not None:
            weight_CH = self._weight_VH[columns].to(self._dtype)
            if self._dtype is not torch.float32 or is_by_onednn(rounded_UC):
                hidden_grad += product(rounded_UC, weight_CH.t())
            else:
                hidden_grad.addmm_(rounded_UC, weight_CH)
        if weight_grad is not None:
            if weight_grad.dtype is not self._dtype or is_by_onednn(rounded_UC):
                weight_grad[columns] += weight_gradient(rounded_UC, self._hidden_UH)
            else:
                weight_grad[columns].addmm_(rounded_UC.t(), self._hidden_UH)
        if bias_grad is not None:
            bias_grad[columns] = delta_UC.sum(dim=0)


def _inside(targets_U: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether each target is in the stretch, and its position there, or any other.

    It does not wait for the device, as a choice of rows would.
    """
    is_here_U = (targets_U >= columns.start) & (targets_U < columns.stop)
    places_U = (targets_U - columns.start).clamp(0, columns.stop - columns.start - 1)
    return is_here_U, places_U[:, None]


def _take_in(
    logits_UC: torch.Tensor, highest_U: torch.Tensor, total_U: torch.Tensor, moment_U: torch.Tensor
) -> None:
    """Update sum(exp(z - highest)) and sum(z exp(z - highest)) in place."""
    higher_U = torch.maximum(highest_U, logits_UC.amax(dim=1))
    rescale_U = torch.exp(highest_U - higher_U)
    weights_UC = (logits_UC - higher_U[:, None]).exp_()
    total_U.mul_(rescale_U).add_(weights_UC.sum(dim=1))
    moment_U.mul_(rescale_U).add_(torch.linalg.vecdot(weights_UC, logits_UC))
    highest_U.copy_(higher_U)
