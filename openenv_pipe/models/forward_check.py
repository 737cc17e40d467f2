"""Compares the package's forward passes with the model's own before anything is sampled.

`architecture_check.py` rejects what configurations say. A model may still attend, or use its
adapter, in a way that the engine's cache or packed rows do not implement. A run would go on, with
other logprobs than the model's. Therefore the passes are compared once, on a few tokens, with an
adapter that has an effect. A model that packed rows do not fit is trained in padded rows; any other
disagreement is an error.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.architecture_check import ADVICE
from openenv_pipe.models.attention.packed import UnsupportedAttentionError
from openenv_pipe.models.policy import Policy
from openenv_pipe.system.out_of_memory import as_out_of_memory
from openenv_pipe.types import Sample

NUM_TOKENS = 40  # of the probe, or fewer if the model has fewer positions
NUM_STEPS = 7  # the engine gets so many of them one by one, behind the others
NUM_SHARED = 7  # with which both samples of the packed row begin
PROBE_SIZE = 0.02  # standard deviation of what is added to an adapter
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.5}  # of a logprob's difference, in nats


def check_forward(policy: Policy) -> str | None:
    """Compare the forward passes, and set `policy.packs_rows` and `policy.slow_forward_reason`.

    Returns why samples are padded instead of packed; None if they are packed.

    Raises:
        ConfigError: the logprobs of the learner or of the local engine differ from the model's own.
    """
    try:
        with torch.inference_mode(), _moved_adapter(policy):
            return _check(policy)
    except ConfigError:
        raise
    except Exception as error:
        if as_out_of_memory(error) is not None:
            raise
        first_line = (str(error) or repr(error)).splitlines()[0]
        raise ConfigError(
            f"model.path: the forward pass of {type(policy.decoder).__name__} fails on a probe "
            f"({type(error).__name__}: {first_line:.200}), so that it cannot be trained; {ADVICE}"
        ) from error


def _check(policy: Policy) -> str | None:
    num_tokens = min(NUM_TOKENS, policy.max_length or NUM_TOKENS)
    token_ids = torch.arange(1, num_tokens + 1, device=policy.device)[None]
    expected = torch.log_softmax(policy.model_logits(token_ids).float(), dim=-1)[0]
    bound = BOUNDS[policy.precision]

    def difference(logits: torch.Tensor) -> float:
        """Return the largest difference from the last of the expected logprobs."""
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        return (logprobs - expected[-len(logits) :]).abs().max().item()

    if policy.is_fast and not difference(_row_logits(policy, token_ids)) <= bound:
        policy.slow_forward_reason = "the fast forward pass differs from the model's own"
    differences = [
        ("the learner's", difference(policy.logits(policy.hidden(token_ids))[0])),
        ("engine=local's", difference(_row_logits(policy, token_ids))),
    ]
    if policy.pictures is not None:
        # Imported late, because they import Pillow, which few runs need.
        from openenv_pipe.models.picture_check import picture_differences
        from openenv_pipe.models.vision_policy import VisionPolicy

        assert isinstance(policy, VisionPolicy)
        differences += [(f"{w} (with pictures)", d) for w, d in picture_differences(policy).items()]
    for whose, found in differences:
        if not found <= bound:  # also rejects NaN
            raise ConfigError(
                f"{whose} forward pass differs from the model's own by {found:.3g} in a logprob, "
                f"where {bound:g} is allowed for {policy.precision}; this architecture "
                f"({type(policy.decoder).__name__}) is not supported; {ADVICE}"
            )
    ids = token_ids[0].tolist()
    reason = (
        policy.padding_reason or _missing_argument(policy) or _packing_problem(policy, ids, bound)
    )
    policy.packs_rows = reason is None
    return reason


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


def _packing_problem(policy: Policy, ids: list[int], bound: float) -> str | None:
    """Compare the logprobs of two samples that share a packed row with those of each by itself."""
    rows = [ids, ids[:NUM_SHARED] + ids[: NUM_SHARED - 1 : -1]]
    alone = []
    for row in rows:
        logits = policy.model_logits(torch.tensor([row], device=policy.device))[0, :-1].float()
        targets = torch.tensor(row[1:], device=policy.device)[:, None]
        alone.append(torch.log_softmax(logits, dim=-1).gather(1, targets)[:, 0])
    batch = pack([_sample(row) for row in rows], share=True, device=policy.device)
    try:
        packed_N = policy.logprobs(batch, 1.0)[0]
    except UnsupportedAttentionError as error:
        return str(error)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if policy.device.type == "cpu":
            raise
        return f"the GPU kernel of packed rows cannot be compiled: {error}"
    difference = (packed_N - torch.cat(alone)).abs().max().item()
    if difference <= bound:
        return None
    return f"logprobs in packed rows differ by {difference:.3g}, and {bound:g} is allowed"


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


def _row_logits(policy: Policy, token_ids: torch.Tensor) -> torch.Tensor:
    """Return logits [K, V] of the last tokens as the engine computes them: all from its cache."""
    (forward,) = policy.row_forwards(1)
    forward.reserve_rows(1)
    num_tokens = token_ids.shape[1]
    logits = [forward.feed([token_ids[0, :-NUM_STEPS].tolist()], [0])]
    for position in range(num_tokens - NUM_STEPS, num_tokens):
        position_1 = torch.tensor([position], device=policy.device)
        logits.append(forward.step(token_ids[0, position_1], position_1))
    return torch.cat(logits)
