"""Before anything is sampled: do the model's own forward pass and ours agree?

An architecture may scale or cap its logits, or attend in a way that the engine's cache or packed
rows do not know. All would go on, with a policy that is another than the model's. So it is tried,
once. What packed rows do not fit is trained in padded ones; all else is refused.
"""

import warnings

import torch

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.kv_cache import RaggedCache
from openenv_pipe.models.policy import Policy
from openenv_pipe.types import Sample

LENGTH = 12  # tokens of the probe
SPLIT = 5  # of which the engine gets these first, and the others with its cache
BRANCH = 7  # where two samples of a packed row part
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.5}  # of a logprob


@torch.inference_mode()
def check_forward(policy: Policy) -> None:
    """Raises ConfigError with the largest difference of a logprob, if it is over the bound."""
    token_ids = torch.arange(1, LENGTH + 1, device=policy.device)[None]
    expected = torch.log_softmax(policy.model_logits(token_ids).float(), dim=-1)
    ways = {
        "the learner's": policy.logits(policy.hidden(token_ids)),
        "engine=local's": _cached(policy, token_ids),
    }
    bound = BOUNDS[policy.precision]
    for whose, logits in ways.items():
        difference = (torch.log_softmax(logits.float(), dim=-1) - expected).abs().max().item()
        if not difference <= bound:  # NaN is no agreement
            raise ConfigError(
                f"{whose} forward pass differs from the model's own by {difference:.3g} in a "
                f"logprob, where {bound:g} is allowed for {policy.precision}; this architecture "
                "is not supported, choose one like Qwen3 or Llama"
            )
    policy.packs_rows = _packing_difference(policy) <= bound


def _packing_difference(policy: Policy) -> float:
    """Of a logprob, at most, between two samples that share a packed row and each by itself."""
    ids = list(range(1, LENGTH + 1))
    rows = [ids, ids[:BRANCH] + ids[::-1]]
    own = []
    for row in rows:
        logits = policy.model_logits(torch.tensor([row], device=policy.device))[0, :-1].float()
        targets = torch.tensor(row[1:], device=policy.device)[:, None]
        own.append(torch.log_softmax(logits, dim=-1).gather(1, targets)[:, 0])
    batch = pack([_sample(row) for row in rows], share=True, device=policy.device)
    try:
        packed_N = policy.logprobs(batch, 1.0)[0]
    except (ConfigError, TypeError):  # attention with something extra, or no door for ours
        return float("inf")
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # a GPU's kernels are compiled at their first use
        if policy.device.type == "cpu":
            raise
        warnings.warn(f"samples are padded, not packed: {error}", stacklevel=2)
        return float("inf")
    return (packed_N - torch.cat(own)).abs().max().item()


def _sample(row: list[int]) -> Sample:
    """Trained on all but its first token."""
    mask = [False] + [True] * (len(row) - 1)
    zeros = [0.0] * len(row)
    return Sample(group="canary", token_ids=row, loss_mask=mask, logprobs=zeros, advantages=zeros)


def _cached(policy: Policy, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits [1, LENGTH, V] by the engine's way: the second part sees the first in a cache."""
    cache = RaggedCache(policy.num_layers)
    cache.add_rows(1)
    parts = []
    for ids, start in ((token_ids[:, :SPLIT], 0), (token_ids[:, SPLIT:], SPLIT)):
        positions = torch.arange(start, start + ids.shape[1], device=policy.device)[None]
        mask = cache.write_at(positions)
        parts.append(policy.logits(policy.hidden(ids, positions, mask, cache)))
    return torch.cat(parts, dim=1)
