"""Choose how a model is trained and sampled, by comparison with the model's own forward pass.

`architecture_check.py` rejects what configurations reveal. A model may still attend, keep a state,
or use its adapter, in a way that packed rows or the engine's cache do not implement. The run would
then go on with wrong logprobs. Therefore the passes are compared once, before anything is sampled,
from the fastest to the slowest, on a few rows and with an adapter that has an effect. The first
that agrees is used; it is an error if none agrees.

Shape letters: N tokens of all rows, K places that are compared, V vocabulary.
"""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.forward.attention.packed import OWN, UnsupportedAttentionError
from openenv_pipe.models.forward.forward_probe import (
    MAX_TOKENS,
    SAFE_TOKENS,
    ForwardProbe,
    build_probe,
    is_recurrent,
    longest_span,
    probe_length,
)
from openenv_pipe.models.forward.logit_transform import ADVICE
from openenv_pipe.models.forward.own_logprobs import BOUNDS, NOISE, Expected, own_logprobs
from openenv_pipe.models.forward.row_forward import Sampler
from openenv_pipe.models.policy import Policy
from openenv_pipe.system.out_of_memory import as_out_of_memory
from openenv_pipe.types import Sample

PROBE_SIZE = 0.02  # standard deviation of what is added to an adapter
# In nats: what a pass may differ by where rounding is not measured, or NOISE times the learner's.
EXACT = {torch.float32: 1e-4, torch.bfloat16: 0.5}
UNPROBED = "compared in longer rows"
RECURRENT = "its recurrent layers keep a state"


def check_forward(policy: Policy, max_tokens: int | None = None) -> str | None:
    """Choose `policy.packs_rows` and `policy.sampler`; `policy.left_out` says why none is faster.

    max_tokens: of an episode, if that is limited.

    Returns why samples are padded instead of packed; None if they are packed.

    Raises:
        ConfigError: the logprobs of the learner or of the local engine differ from the model's own.
    """
    wanted = probe_length(policy, max_tokens)
    for most in _most_tokens(policy):
        length = min(wanted, most)
        policy.left_out.pop(UNPROBED, None)
        if length < wanted:
            policy.left_out[UNPROBED] = (
                f"windows or chunks have {longest_span(policy, max_tokens):,} tokens, and rows of "
                f"{length:,} were compared"
            )
        try:
            with torch.inference_mode(), _moved_adapter(policy):
                return _check(policy, build_probe(length))
        except ConfigError:
            raise
        except Exception as error:
            if as_out_of_memory(error) is None:
                raise ConfigError(
                    f"model.path: the forward pass of {type(policy.decoder).__name__} fails on a "
                    f"probe ({_first_line(error)}), so that it cannot be trained; {ADVICE}"
                ) from error
            if length <= SAFE_TOKENS:
                raise
        finally:
            if policy.device.type == "cuda":  # for a server that starts next on the same GPU
                torch.cuda.empty_cache()
    raise AssertionError("the last length is safe")


def _most_tokens(policy: Policy) -> list[int]:
    """Return how many tokens rows may have, and how many if memory does not suffice for them.

    On a CPU, missing memory ends the process, and ranks have to compute the same rows.
    """
    is_sharded = any(hasattr(each, "to_local") for each in policy.model.parameters())
    is_safe = is_sharded or policy.device.type == "cpu"
    return [SAFE_TOKENS] if is_safe else [MAX_TOKENS, SAFE_TOKENS]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error) or repr(error)).splitlines()[0]:.200}"


def _check(policy: Policy, probe: ForwardProbe) -> str | None:
    targets, rows = own_logprobs(policy, probe)
    policy.packs_rows = False
    policy.left_out.pop("packed", None)
    learned_N = _learned(policy, probe)
    if (problem := targets.problem(learned_N)) and policy.images is None:
        policy.left_out["packed"] = f"attention by scaled dot products {problem}"
        policy.attention = OWN
        learned_N = _learned(policy, probe)
        problem = targets.problem(learned_N)
    if problem:
        raise _rejection(policy, "the learner's", problem)
    for whose, difference in policy.image_differences().items():
        if not difference <= BOUNDS[policy.precision]:  # also rejects NaN
            problem = f"differs from the model's own by {difference:.3g} in a logprob"
            raise _rejection(policy, whose, problem)
    if not targets.medians:  # Rounding is not measured: it is what the learner differs by.
        rounding = targets.differences(learned_N).max().item()
        bound = max(EXACT[policy.precision], NOISE * rounding)
        targets, rows = replace(targets, largest=bound), replace(rows, largest=bound)
    reason = policy.padding_reason or policy.left_out.get("packed") or _missing_argument(policy)
    if UNPROBED in policy.left_out:
        reason = reason or f"it is not {UNPROBED}"
    if is_recurrent(policy):  # In bfloat16, a state left by another row may pass for rounding.
        reason = reason or RECURRENT
    if reason is None:
        policy.packs_rows = True
        reason = _packing_problem(policy, probe, targets)
        policy.packs_rows = reason is None
    if reason is not None:
        policy.left_out["packed"] = reason
    _choose_sampler(policy, probe, rows)
    return reason


def _rejection(policy: Policy, whose: str, problem: str) -> ConfigError:
    return ConfigError(
        f"{whose} forward pass {problem} for {policy.precision}; this architecture "
        f"({type(policy.decoder).__name__}) is not supported; {ADVICE}"
    )


def _choose_sampler(policy: Policy, probe: ForwardProbe, rows: Expected) -> None:
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
            problem: str | None = f"fails on a probe ({_first_line(error)})"
        else:
            problem = rows.problem(torch.log_softmax(logits_KV.float(), dim=-1))
            if problem is None:
                return
        policy.left_out[sampler] = f"it {problem}"
    raise _rejection(policy, "engine=local's", str(problem))


def _learned(policy: Policy, probe: ForwardProbe) -> torch.Tensor:
    """Return the learner's logprobs [N] of all targets."""
    samples = [_sample(row) for row in probe.rows]
    batch = pack(samples, share=policy.packs_rows, device=policy.device)
    return policy.logprobs(batch, 1.0)[0]


def _packing_problem(policy: Policy, probe: ForwardProbe, targets: Expected) -> str | None:
    """Return why the probe's rows cannot be computed as one that shares prefixes."""
    try:
        problem = targets.problem(_learned(policy, probe))
    except UnsupportedAttentionError as error:
        return str(error)
    except Exception as error:
        if as_out_of_memory(error) is not None:
            raise
        return f"the forward pass of packed rows fails ({_first_line(error)})"
    return problem and f"that of packed rows {problem}"


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
    """Return a sample in which all tokens but the first are trained."""
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
