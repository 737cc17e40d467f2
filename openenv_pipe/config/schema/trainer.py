"""`trainer`: GRPO, its loss and optimizer, and the optional warm start."""

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from openenv_pipe.config.schema.base import Beta, Block, DottedPath, Share


class OptimizerConfig(Block):
    """AdamW, or Muon for the hidden matrices with AdamW for all else, and their schedule."""

    type: Literal["adamw", "muon"]
    lr: PositiveFloat
    beta1: Beta
    beta2: Beta
    eps: PositiveFloat
    weight_decay: NonNegativeFloat
    max_grad_norm: PositiveFloat
    schedule: Literal["constant", "linear", "cosine"] = Field(
        description="of the decay after lr_warmup_steps"
    )
    lr_warmup_steps: NonNegativeInt
    final_lr_share: Share = Field(description="the last step's learning rate as a share of lr")


class WarmStartConfig(Block):
    """Supervised steps on episodes that a scripted policy plays. steps 0: no warm start."""

    steps: NonNegativeInt
    policy: DottedPath | None
    num_episodes: NonNegativeInt = Field(description="played once, then sampled from")
    episodes_per_step: PositiveInt
    optimizer: OptimizerConfig

    @model_validator(mode="after")
    def _needs_a_policy(self) -> "WarmStartConfig":
        if self.steps and not (self.policy and self.num_episodes):
            raise ValueError("steps > 0 needs a policy and num_episodes > 0")
        return self


class AdvantageConfig(Block):
    """How rewards of a group become advantages."""

    scale: Literal["std", "none"]
    discount: Share = Field(description="of later turns' per-turn rewards; 0: each turn for itself")


class LossConfig(Block):
    """The policy loss by its name in the literature, and what is added to it."""

    type: Literal["grpo", "dr_grpo", "dapo"]
    clip_low: PositiveFloat
    clip_high: PositiveFloat
    kl_coef: NonNegativeFloat = Field(description="0: no reference model is kept")


class TrainerConfig(Block):
    """Group-relative policy optimisation, and the optional warm start before it."""

    steps: NonNegativeInt
    tasks_per_step: PositiveInt
    group_size: Annotated[int, Field(ge=2)]
    temperature: PositiveFloat
    updates_per_step: PositiveInt = Field(description="optimizer steps on each step's samples")
    tokens_per_batch: PositiveInt = Field(
        description="token budget of one forward and backward pass"
    )
    warm_start: WarmStartConfig
    advantage: AdvantageConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    checkpoint_every: PositiveInt
