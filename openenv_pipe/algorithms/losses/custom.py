"""Policy losses that another package provides. Shape letter: N trained tokens of a batch."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from openenv_pipe.algorithms.losses.policy import PolicyLoss
from openenv_pipe.algorithms.losses.ratios import ratios
from openenv_pipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTokens:
    """The trained tokens of a batch, in one row without padding. All tensors are [N]."""

    logprobs: torch.Tensor  # float32, the trainer's now: the only ones with a gradient
    old_logprobs: torch.Tensor  # float32, those that a ratio is taken to
    advantages: torch.Tensor  # float32
    sample_index: torch.Tensor  # int64: which sample of the batch a token belongs to


class CustomLoss(Protocol):
    """A policy loss as `trainer.loss: {type: python}` names it.

    How tokens are weighted, the KL part and the importance weights of `trainer.loss.correction`
    are added to it as to the built-in losses.
    """

    def __call__(self, tokens: LossTokens, **options: Any) -> torch.Tensor:
        """Return the loss of each token, [N], to be minimised, with a gradient."""


def custom_loss(function: CustomLoss, tokens: LossTokens) -> PolicyLoss:
    """Call the function, whose options are filled in; nothing counts as clipped.

    Raises ConfigError if it does not return one number per token with a gradient.
    """
    loss_N = function(tokens)
    expected = f"expected a tensor of shape [{len(tokens.logprobs)}], one number per token"
    if not isinstance(loss_N, torch.Tensor):
        raise ConfigError(f"trainer.loss.target returned a {type(loss_N).__name__}; {expected}")
    if loss_N.shape != tokens.logprobs.shape:
        raise ConfigError(f"trainer.loss.target returned the shape {[*loss_N.shape]}; {expected}")
    if not loss_N.requires_grad:
        raise ConfigError(
            "trainer.loss.target returned a tensor without a gradient, from which nothing is "
            "learnt; compute it from tokens.logprobs"
        )
    never_N = torch.zeros_like(loss_N, dtype=torch.bool)
    return PolicyLoss(
        loss=loss_N,
        ratio=ratios(tokens.logprobs.detach() - tokens.old_logprobs),
        clipped_low=never_N,
        clipped_high=never_N,
    )
