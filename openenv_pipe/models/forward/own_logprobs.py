"""The logprobs of a model's own forward pass, and how far those of another pass may differ.

In float32 the limits are fixed. In bfloat16, models round by very different amounts, some by nats.
Therefore the model's own pass is computed in float32 too, and another pass may be as far from that
as the model's own is, times `NOISE`. Tests of attention kernels, such as FlashAttention's, compare
in this way. The largest difference finds single tokens that are computed wrong. The medians of
parts of the rows, and of turns of the sampler, find what is wrong at most tokens of a part, such as
those beyond a window. In a mixture, rounding chooses other experts for a few tokens, never the same
ones: there, only the medians count.

Shape letters: T tokens of a row, N of all rows, K places that are compared, V vocabulary.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from openenv_pipe.models.adapter import is_mixture
from openenv_pipe.models.forward.attention.packed import OWN
from openenv_pipe.models.forward.forward_probe import ForwardProbe
from openenv_pipe.models.policy import Policy

# Of a logprob's difference, in nats, where rounding is not measured: what the learner may differ by
# from the model's own forward pass.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.5}
NOISE = 3  # times as much as rounding
MIN_LIMIT = 0.01  # nats; of bfloat16
MIN_PART = 32  # tokens: the medians of fewer differ too much by chance
PART = 512  # tokens whose logprobs of the whole vocabulary are computed at once


@dataclass(frozen=True, slots=True)
class Expected:
    """Logprobs, and how far others may be from them, in nats."""

    logprobs: torch.Tensor  # [N], or [K, V]
    largest: float
    medians: Sequence[tuple[slice, float]] = ()  # of parts of the places; empty: not measured

    def differences(self, found: torch.Tensor) -> torch.Tensor:
        """Return the largest difference of each place, [N] or [K]."""
        difference = (found - self.logprobs).abs()
        return difference if difference.ndim == 1 else difference.amax(dim=-1)

    def problem(self, found: torch.Tensor) -> str | None:
        """Return why other logprobs do not agree; None if they do."""
        differences = self.differences(found)
        measured = [("", differences.max(), self.largest)]
        measured += [
            ("a median of ", differences[part].median(), limit) for part, limit in self.medians
        ]
        for word, number, limit in measured:
            if not number <= limit:  # also rejects NaN
                return (
                    f"differs from the model's own by {word}{number:.3g} in a logprob, where "
                    f"{limit:.3g} is allowed"
                )
        return None


def own_logprobs(policy: Policy, probe: ForwardProbe) -> tuple[Expected, Expected]:
    """Compute each row by itself, as the model's authors compute it.

    Returns the logprobs [N] of all targets, and those [K, V] of the vocabulary. Limits without
    medians are fixed, not measured.
    """
    passes = [policy.model_logits]
    if policy.precision is not torch.float32 and _has_whole_weights(policy.model):
        passes.append(partial(_float32_logits, policy))
    of_targets: list[list[torch.Tensor]] = [[] for _ in passes]
    of_places: list[list[torch.Tensor]] = [[] for _ in passes]
    rounding = 0.0
    for ids, ends in zip(probe.rows, probe.ends_by_row(), strict=True):
        ids_1T = torch.tensor([ids], device=policy.device)
        places = torch.tensor(ends, device=policy.device) - 1
        by_pass = [each(ids_1T)[0] for each in passes]
        for logits_TV, targets, rows in zip(by_pass, of_targets, of_places, strict=True):
            before_TV, targets_T1 = logits_TV[:-1], ids_1T[0, 1:, None]
            of_target = before_TV.gather(1, targets_T1)[:, 0].float()
            sums = torch.cat([each.float().logsumexp(dim=-1) for each in before_TV.split(PART)])
            targets.append(of_target - sums)
            rows.append(torch.log_softmax(logits_TV[places].float(), dim=-1))
        if len(passes) > 1:
            rounding = max(rounding, _largest_difference(*by_pass))
    found = [
        (torch.cat(targets), probe.in_order_of_calls(rows))
        for targets, rows in zip(of_targets, of_places, strict=True)
    ]
    expected_N, expected_KV = found[-1]
    if len(passes) == 1:
        bound = BOUNDS[policy.precision]
        return Expected(expected_N, bound), Expected(expected_KV, bound)
    own_N, own_KV = found[0]
    largest = math.inf if is_mixture(policy.model) else max(MIN_LIMIT, NOISE * rounding)
    return (
        _measured(own_N, expected_N, largest, _parts_of_rows(probe)),
        _measured(own_KV, expected_KV, largest, probe.turns()),
    )


def _measured(
    own: torch.Tensor, exact: torch.Tensor, largest: float, parts: Sequence[slice]
) -> Expected:
    """Limit the median of each part by the model's own there, or overall if that is larger."""
    differences = Expected(exact, largest).differences(own)
    whole = differences.median().item()
    medians = [max(whole, differences[part].median().item()) for part in parts]
    limits = [max(MIN_LIMIT, NOISE * median) for median in medians]
    return Expected(exact, largest, list(zip(parts, limits, strict=True)))


def _parts_of_rows(probe: ForwardProbe) -> list[slice]:
    """Divide the targets of each row into up to eight parts of at least MIN_PART tokens."""
    parts, start = [], 0
    for ids in probe.rows:
        size = len(ids) - 1
        number = max(1, min(8, size // MIN_PART))
        bounds = [start + size * index // number for index in range(number + 1)]
        parts += [slice(*pair) for pair in itertools.pairwise(bounds)]
        start += size
    return parts


def _largest_difference(one_TV: torch.Tensor, other_TV: torch.Tensor) -> float:
    """Return the largest difference of logprobs, with little memory."""
    parts = zip(one_TV.split(PART), other_TV.split(PART), strict=True)
    logprobs = ([torch.log_softmax(x.float(), dim=-1) for x in part] for part in parts)
    return max((one - other).abs().max().item() for one, other in logprobs)


def _has_whole_weights(model: Any) -> bool:
    """Return whether all weights are on this device, and not quantized."""
    return all(
        each.is_floating_point() and not hasattr(each, "to_local") for each in model.parameters()
    )


def _float32_logits(policy: Policy, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, T, V] of transformers' own forward pass in float32.

    Weights are raised to float32 one layer at a time, so that they fit next to the policy's.
    """
    layers = [m for m in policy.model.modules() if isinstance(m, GradientCheckpointingLayer)]
    in_layers = {id(each) for layer in layers for each in layer.parameters()}
    others = [each for each in policy.model.parameters() if id(each) not in in_layers]
    attention = policy.attention
    policy.attention = OWN
    try:
        with contextlib.ExitStack() as raised:
            raised.enter_context(_in_float32(others))
            for layer in layers:
                _raise_when_called(layer, raised)
            return policy.model(input_ids=token_ids, use_cache=False).logits
    finally:
        policy.attention = attention


def _raise_when_called(layer: torch.nn.Module, raised: contextlib.ExitStack) -> None:
    """Let a layer's weights be in float32 in each of its calls, until the stack is closed."""
    calls: list[Any] = []

    def before(*_: Any) -> None:
        calls.append(contextlib.ExitStack())
        calls[-1].enter_context(_in_float32(layer.parameters()))

    def after(*_: Any) -> None:
        calls.pop().close()

    raised.callback(layer.register_forward_pre_hook(before).remove)
    raised.callback(layer.register_forward_hook(after, always_call=True).remove)


@contextlib.contextmanager
def _in_float32(parameters: Any) -> Iterator[None]:
    """Within the block, let these parameters have their values in float32."""
    before = [(each, each.data) for each in parameters if each.dtype is not torch.float32]
    try:
        for parameter, values in before:
            parameter.data = values.float()
        yield
    finally:
        for parameter, values in before:
            parameter.data = values
