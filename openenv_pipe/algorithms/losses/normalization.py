"""Normalization of a loss over tokens and episodes. Shape letter: N trained tokens of a batch."""

from dataclasses import dataclass
from typing import Literal

import torch

Normaliser = Literal["sample", "token", "constant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What the loss of an update is a mean over, so that the split into batches changes nothing.

    With several updates per step, each counts its share of the step's `Uncomputed`.
    """

    num_episodes: float
    num_tokens: float  # of the agent
    num_computed_tokens: int  # of these, those that the update has samples of
    num_environment_tokens: int = 0  # with a loss
    max_tokens: int  # that a sample could have: env.max_episode_tokens, the greatest of several


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncomputed:
    """Episodes that count in a step's loss but have no samples, because their own loss is zero."""

    num_episodes: int = 0
    num_tokens: int = 0  # of the agent


def token_weights(
    episode_tokens_N: torch.Tensor, *, normaliser: Normaliser, counts: Counts
) -> torch.Tensor:
    """Return the weight of each token in the loss of the whole update, [N].

    sample     a mean over each episode's tokens, then over episodes (GRPO, arXiv:2402.03300)
    token      a mean over all tokens (DAPO, arXiv:2503.14476)
    constant   a sum over each episode's tokens, divided by a constant: the weight of a token does
               not depend on the length of its episode (Dr. GRPO, arXiv:2503.20783)

    In the papers an episode has one sample. An episode that branches into several has one reward,
    and weighs as much as an episode of one sample with the same trained tokens.

    episode_tokens_N: float32, how many trained tokens the episode of each token has
    """
    ones_N = torch.ones_like(episode_tokens_N)
    match normaliser:
        case "sample":
            return ones_N / (counts.num_episodes * episode_tokens_N)
        case "token":
            return ones_N / counts.num_tokens
        case "constant":
            return ones_N / (counts.num_episodes * counts.max_tokens)
