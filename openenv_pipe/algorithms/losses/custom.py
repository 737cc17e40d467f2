"""Policy losses that another package provides. Shape letter: N trained tokens of a batch."""

from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from openenv_pipe.algorithms.losses.policy import PolicyLoss
from openenv_pipe.algorithms.losses.ratios import ratios
from openenv_pipe.config.schema import PythonLossConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.copies import copied
from openenv_pipe.system.python_targets import load_function
from openenv_pipe.system.user_code import ending_when_late, named


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTokens:
    """The trained tokens of a batch, in one row without padding. All tensors are [N]."""

    logprobs: torch.Tensor  # float32, the trainer's now: the only ones with a gradient
    old_logprobs: torch.Tensor  # float32, those that a ratio is taken to
    advantages: torch.Tensor  # float32
    sample_index: torch.Tensor  # int64: which sample of the batch a token belongs to


class CustomLoss(Protocol):
    """A policy loss as `trainer.loss: {type: python}` names it.

    As with the built-in losses, the token weights and the importance weights of
    `trainer.loss.correction` multiply it, and the KL term and the entropy bonus are added.
    """

    def __call__(self, tokens: LossTokens, **options: Any) -> torch.Tensor:
        """Return the loss of each token, [N], to be minimised, with a gradient."""


class UserLoss:
    """A user's function as a policy loss, in which no token counts as clipped."""

    def __init__(self, config: PythonLossConfig) -> None:
        """Raises ConfigError if the target cannot be used."""
        self._name = f"trainer.loss.target={config.target!r}"
        self._options = config.options
        self._function: CustomLoss = load_function("trainer.loss", config, 1)

    def __call__(self, tokens: LossTokens) -> PolicyLoss:
        """Call the function with copies of the tensors, in this thread, where torch is set up.

        Raises:
            ConfigError: it has failed, or did not return a finite number per token with a gradient.
        """
        given = LossTokens(
            **{each.name: getattr(tokens, each.name).clone() for each in fields(tokens)}
        )
        with named(self._name, (torch.OutOfMemoryError,)), ending_when_late(self._name):
            loss_N = self._function(given, **copied(self._options))
        expected = f"expected a tensor of shape [{len(tokens.logprobs)}], one number per token"
        if not isinstance(loss_N, torch.Tensor):
            raise ConfigError(f"{self._name} returned a {type(loss_N).__name__}; {expected}")
        if loss_N.shape != tokens.logprobs.shape:
            raise ConfigError(f"{self._name} returned the shape {[*loss_N.shape]}; {expected}")
        if not loss_N.is_floating_point():
            raise ConfigError(f"{self._name} returned numbers of type {loss_N.dtype}; {expected}")
        if not loss_N.requires_grad:
            raise ConfigError(
                f"{self._name} returned a tensor without a gradient, from which nothing is learnt; "
                "compute it from tokens.logprobs"
            )
        if not loss_N.isfinite().all() and tokens.logprobs.isfinite().all():
            index = int(loss_N.isfinite().logical_not().nonzero()[0])
            raise ConfigError(
                f"{self._name} returned {loss_N[index].item()} for token {index} of "
                f"{len(loss_N)}, whose logprob is {tokens.logprobs[index].item():g}, old logprob "
                f"{tokens.old_logprobs[index].item():g} and advantage "
                f"{tokens.advantages[index].item():g}; expected finite numbers"
            )
        never_N = torch.zeros_like(loss_N, dtype=torch.bool)
        return PolicyLoss(
            loss=loss_N,
            ratio=ratios(tokens.logprobs.detach() - tokens.old_logprobs),
            clipped_low=never_N,
            clipped_high=never_N,
        )
