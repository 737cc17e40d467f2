"""The KL divergence of a policy from its teacher over the whole vocabulary.

Few rows have logits at a time, which the backward pass computes again. Shape letters: U predicted
tokens, R some of them, N trained tokens, H hidden size, V the policy's vocabulary.
"""

import torch
from torch.utils.checkpoint import checkpoint

from openenv_pipe.models.policy import Policy
from openenv_pipe.types import Batch

ELEMENTS = 1 << 20  # logits of each model at a time, on a CPU
GPU_ELEMENTS = 1 << 25  # the same on a GPU, whose kernels have to be long: 128 MiB


def teacher_divergence(
    policy: Policy, hidden_UH: torch.Tensor, batch: Batch, temperature: float
) -> torch.Tensor:
    """Return KL(policy || teacher) [N], in nats, both at the temperature.

    It is of the distributions that each trained token was chosen from. Tokens that only the teacher
    has are never chosen, and only count in its own normalization.

    hidden_UH: the policy's, of `Policy.predictors_hidden`
    """
    teacher = policy.teacher
    assert teacher is not None, "give_teacher was not called"

    def part(ours_RH: torch.Tensor, theirs_RH: torch.Tensor) -> torch.Tensor:
        ours_RV = torch.log_softmax(policy.logits(ours_RH).float() / temperature, dim=-1)
        with torch.no_grad():
            theirs_RV = torch.log_softmax(teacher.logits(theirs_RH).float() / temperature, dim=-1)
        return (ours_RV.exp() * (ours_RV - theirs_RV[:, : ours_RV.shape[1]])).sum(dim=-1)

    with torch.no_grad():
        teacher_UH = teacher.predictors_hidden(batch)
    elements = ELEMENTS if hidden_UH.device.type == "cpu" else GPU_ELEMENTS
    num_rows = max(1, elements // policy.model.get_input_embeddings().num_embeddings)
    pairs = zip(hidden_UH.split(num_rows), teacher_UH.split(num_rows), strict=True)
    divergence_U = torch.cat([checkpoint(part, *pair, use_reentrant=False) for pair in pairs])
    return divergence_U.index_select(0, batch.places)
