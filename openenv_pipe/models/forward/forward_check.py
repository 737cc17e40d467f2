"""Chooses how a model is trained and sampled, by comparing with the model's own forward pass.

`architecture_check.py` rejects what configurations say. A model may still attend, keep a state, or
use its adapter, in a way that packed rows or the engine's cache do not implement. A run would go
on, with other logprobs than the model's. Therefore the passes are compared once, before anything
is sampled, from the fastest to the slowest, on a few rows and with an adapter that has an effect.
The first that agrees is used; a model that none agrees with is an error.

Shape letters: T tokens of a row, N of all rows, K places that are compared, V vocabulary.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.forward.architecture_check import ADVICE
from openenv_pipe.models.forward.attention.packed import OWN, UnsupportedAttentionError
from openenv_pipe.models.forward.forward_probe import (
    ForwardProbe,
    build_probe,
    is_recurrent,
    probe_length,
)
from openenv_pipe.models.forward.row_forward import Sampler
from openenv_pipe.models.policy import Policy
from openenv_pipe.system.out_of_memory import as_out_of_memory
from openenv_pipe.types import Sample

PROBE_SIZE = 0.02  # standard deviation of what is added to an adapter
# Of a logprob's difference, in nats: between the model's own forward pass and the learner's, which
# is rounding, and what any other pass may differ by, or NOISE times the learner's.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.5}
EXACT = {torch.float32: 1e-4, torch.bfloat16: 0.5}
NOISE = 4
RECURRENT = "its recurrent layers keep a state"


def check_forward(policy: Policy, max_tokens: int | None = None) -> str | None:
    """Choose `policy.packs_rows` and `policy.sampler`; `policy.left_out` says why none is faster.

    max_tokens: of an episode, if that is limited.

    Returns why samples are padded instead of packed; None if they are packed.

    Raises:
        ConfigError: the logprobs of the learner or of the local engine differ from the model's own.
    """
    try:
        with torch.inference_mode(), _moved_adapter(policy):
            return _check(policy, build_probe(probe_length(policy, max_tokens)))
    except ConfigError:
        raise
    except Exception as error:
        if as_out_of_memory(error) is not None:
            raise
        raise ConfigError(
            f"model.path: the forward pass of {type(policy.decoder).__name__} fails on a probe "
            f"({_first_line(error)}), so that it cannot be trained; {ADVICE}"
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error) or repr(error)).splitlines()[0]:.200}"


def _check(policy: Policy, probe: ForwardProbe) -> str | None:
    own_N, own_KV = _own_logprobs(policy, probe)
    policy.packs_rows = False
    policy.left_out.pop("packed", None)
    difference = _learner_difference(policy, probe, own_N)
    if not difference <= BOUNDS[policy.precision] and policy.images is None:
        policy.left_out["packed"] = (
            f"attention by scaled dot products {_excess(policy, difference)}"
        )
        policy.attention = OWN
        difference = _learner_difference(policy, probe, own_N)
    differences = {"the learner's": difference, **policy.image_differences()}
    for whose, difference in differences.items():
        if not difference <= BOUNDS[policy.precision]:  # also rejects NaN
            raise _rejection(policy, whose, _excess(policy, difference))
    bound = max(EXACT[policy.precision], NOISE * differences["the learner's"])
    reason = policy.padding_reason or policy.left_out.get("packed") or _missing_argument(policy)
    if is_recurrent(policy):  # In bfloat16, a state of the row before it may pass for rounding.
        reason = reason or RECURRENT
    if reason is None:
        policy.packs_rows = True
        reason = _packing_problem(policy, probe, own_N, bound)
        policy.packs_rows = reason is None
    if reason is not None:
        policy.left_out["packed"] = reason
    _choose_sampler(policy, probe, own_KV, bound)
    return reason


def _rejection(policy: Policy, whose: str, problem: str) -> ConfigError:
    return ConfigError(
        f"{whose} forward pass {problem}; this architecture ({type(policy.decoder).__name__}) is "
        f"not supported; {ADVICE}"
    )


def _excess(policy: Policy, difference: float, bound: float | None = None) -> str:
    bound = BOUNDS[policy.precision] if bound is None else bound
    return (
        f"differs from the model's own by {difference:.3g} in a logprob, where {bound:.3g} is "
        f"allowed for {policy.precision}"
    )


def _choose_sampler(
    policy: Policy, probe: ForwardProbe, own_KV: torch.Tensor, bound: float
) -> None:
    """Set `policy.sampler` to the first that agrees with the model's own logprobs."""
    for sampler in policy.samplers[policy.samplers.index(policy.sampler) :]:
        policy.sampler = sampler
        if sampler is Sampler.RAGGED and is_recurrent(policy):
            policy.left_out[sampler] = RECURRENT
            continue
        try:
            logits_KV = probe.sample(policy)
        except Exception as error:
            if as_out_of_memory(error) is not None:
                raise
            problem = f"fails on a probe ({_first_line(error)})"
        else:
            found_KV = torch.log_softmax(logits_KV.float(), dim=-1)
            difference = (found_KV - own_KV).abs().max().item()
            if difference <= bound:
                return
            problem = _excess(policy, difference, bound)
        policy.left_out[sampler] = f"it {problem}"
    raise _rejection(policy, "engine=local's", problem)


def _own_logprobs(policy: Policy, probe: ForwardProbe) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprobs [N] of all targets, and those [K, V] of the vocabulary, of each row by
    itself, as the model's authors compute them."""
    of_targets, rows_TV = [], []
    for row, ends in zip(probe.rows, probe.ends_by_row(), strict=True):
        logits_TV = policy.model_logits(torch.tensor([row], device=policy.device))[0].float()
        targets_T1 = torch.tensor(row[1:], device=policy.device)[:, None]
        found = logits_TV[:-1].gather(1, targets_T1)[:, 0] - logits_TV[:-1].logsumexp(dim=-1)
        of_targets.append(found)
        places = torch.tensor([end - 1 for end in ends], device=policy.device)
        rows_TV.append(torch.log_softmax(logits_TV[places], dim=-1))
    return torch.cat(of_targets), probe.in_order_of_calls(rows_TV)


def _learner_difference(policy: Policy, probe: ForwardProbe, own_N: torch.Tensor) -> float:
    """Return the largest difference of the learner's logprobs from the model's own."""
    samples = [_sample(row) for row in probe.rows]
    batch = pack(samples, share=policy.packs_rows, device=policy.device)
    return (policy.logprobs(batch, 1.0)[0] - own_N).abs().max().item()


def _packing_problem(
    policy: Policy, probe: ForwardProbe, own_N: torch.Tensor, bound: float
) -> str | None:
    """Return why the probe's rows cannot be computed as one that shares prefixes."""
    try:
        difference = _learner_difference(policy, probe, own_N)
    except UnsupportedAttentionError as error:
        return str(error)
    except Exception as error:
        if as_out_of_memory(error) is not None:
            raise
        return f"the forward pass of packed rows fails ({_first_line(error)})"
    if difference <= bound:
        return None
    return f"logprobs in packed rows differ by {difference:.3g}, and {bound:.3g} is allowed"


@contextlib.contextmanager
def _moved_adapter(policy: Policy) -> Iterator[None]:
    """Within the block, add random values to an adapter, which does nothing before it is trained.

    Of a sharded policy, each rank moves its own shards.
    """
    adapter: list[Any] = [v.data for name, v in policy.trained_parameters() if ".lora_" in name]
    shards = [each.to_local() if hasattr(each, "to_local") else each for each in adapter]
    own = [each.clone() for each in shards]
    draw = torch.Generator().manual_seed(0)
    try:
        for each in shards:
            each += (torch.randn(each.shape, generator=draw) * PROBE_SIZE).to(each)
        yield
    finally:
        for each, values in zip(shards, own, strict=True):
            each.copy_(values)


def _missing_argument(policy: Policy) -> str | None:
    """Name the first module on the way to the attention whose forward takes no `packed_row`."""
    decoder = policy.decoder
    for module in decoder.modules():
        is_attention = type(module).__name__.endswith("Attention")
        if module is decoder or is_attention or isinstance(module, GradientCheckpointingLayer):
            parameters = inspect.signature(module.forward).parameters
            takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            if not takes_any and "packed_row" not in parameters:
                return f"{type(module).__name__}.forward does not take packed_row"
    return None


def _sample(row: list[int]) -> Sample:
    """A sample that is trained on all but its first token."""
    mask = [False] + [True] * (len(row) - 1)
    zeros = [0.0] * len(row)
    return Sample(
        group="probe",
        member=0,
        num_episode_tokens=sum(mask),
        token_ids=row,
        loss_mask=mask,
        logprobs=zeros,
        advantages=zeros,
    )
