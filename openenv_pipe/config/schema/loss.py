"""`trainer.loss`: the policy loss, what it is a mean over, and what is added to it."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from openenv_pipe.config.schema.base import Block, PythonTarget


class KlConfig(Block):
    """The KL divergence to the policy as it was before the first step, as a part of the loss."""

    coef: NonNegativeFloat = Field(description="0: no reference is kept")
    estimator: Literal["k1", "k2", "k3"]
    importance_weights: bool = Field(
        description="true: its gradient is the divergence's own; false: as in GRPO's paper"
    )

    @model_validator(mode="after")
    def _has_a_gradient(self) -> "KlConfig":
        if self.estimator == "k1" and not self.importance_weights:
            raise ValueError(
                "estimator=k1 with importance_weights=false: its gradient is zero on average; set "
                "importance_weights=true, or estimator=k2 or k3"
            )
        return self


class CorrectionConfig(Block):
    """Weights of old policy over sampler for tokens that other weights, kernels or precision
    sampled. none: the sampler's logprobs are the old ones, and the clip acts on all of it."""

    type: Literal["none", "truncate", "mask", "geometric"] = Field(
        description="truncate: per token, at most `high`; mask: tokens outside [low, high] are "
        "left out; geometric: one weight a sample, their geometric mean, at most `high`"
    )
    low: PositiveFloat = Field(description="of mask")
    high: PositiveFloat

    @model_validator(mode="after")
    def _holds_one(self) -> "CorrectionConfig":
        if not self.low < 1.0 < self.high:
            raise ValueError(
                f"low={self.low:g} and high={self.high:g}: a weight of 1, for a sampler that "
                "agrees, has to be between them"
            )
        return self


class LossBlock(Block):
    """What all losses share: what they are a mean over, and what is added to them."""

    normalise: Literal["sample", "token", "constant"] = Field(
        description="a mean over each sample's tokens, over all tokens, or a sum over a constant"
    )
    entropy_coef: NonNegativeFloat = Field(description="of a bonus for the mean entropy of tokens")
    kl: KlConfig
    correction: CorrectionConfig


class ClippedLossConfig(LossBlock):
    """A policy loss that clips probability ratios."""

    type: Literal["grpo", "gspo", "cispo"] = Field(
        description="grpo: PPO's clip per token; gspo: per sample; cispo: clipped weights"
    )
    clip_low: PositiveFloat
    clip_high: PositiveFloat

    @property
    def title(self) -> str:
        """What reports call it."""
        return self.type

    @model_validator(mode="after")
    def _samples_weigh_the_same(self) -> "ClippedLossConfig":
        if self.type == "gspo" and self.normalise != "sample":
            raise ValueError(
                f"type=gspo with normalise={self.normalise}: its ratio is one of a sample, and "
                "would count once for each token; set normalise=sample"
            )
        return self


class PythonLossConfig(LossBlock, PythonTarget):
    """An `openenv_pipe.algorithms.losses.custom.CustomLoss`: target(tokens, **options)."""

    @property
    def title(self) -> str:
        """What reports call it."""
        return self.target


LossConfig = Annotated[ClippedLossConfig | PythonLossConfig, Field(discriminator="type")]
