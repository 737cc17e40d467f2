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

from openenv_pipe.config.schema.base import Beta, Block, DottedPath, PythonTarget, Share
from openenv_pipe.config.schema.checkpoint import CheckpointConfig
from openenv_pipe.config.schema.loss import LossConfig


class OptimizerConfig(Block):
    """AdamW, or Muon for the hidden matrices with AdamW for all else, and their schedule."""

    type: Literal["adamw", "adamw_8bit", "muon"] = Field(
        description="adamw_8bit: its moments in one byte each"
    )
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


class GroupRelativeAdvantageConfig(Block):
    """Rewards beyond a baseline, over a standard deviation."""

    type: Literal["group_relative"]
    baseline: Literal["group", "leave_one_out", "batch"] = Field(
        description="the mean that a reward is compared with: of its group, of the group's others, "
        "or of all episodes of the step"
    )
    scale: Literal["group", "batch", "none"] = Field(
        description="the standard deviation that it is divided by"
    )
    discount: Share = Field(description="of later turns' per-turn rewards; 0: each turn for itself")

    @model_validator(mode="after")
    def _one_population(self) -> "GroupRelativeAdvantageConfig":
        if self.baseline == "batch" and self.scale == "group":
            raise ValueError(
                "baseline=batch with scale=group: rewards would be compared over all groups and "
                "scaled group by group; set scale=batch or scale=none"
            )
        return self


class PythonAdvantageConfig(PythonTarget):
    """An `algorithms.custom_advantages.CustomAdvantages`: target(groups, **options)."""


AdvantageConfig = Annotated[
    GroupRelativeAdvantageConfig | PythonAdvantageConfig, Field(discriminator="type")
]


class TrainerConfig(Block):
    """Group-relative policy optimisation, and the optional warm start before it."""

    steps: NonNegativeInt
    tasks_per_step: PositiveInt
    group_size: Annotated[int, Field(ge=2)]
    max_sampling_rounds: PositiveInt = Field(
        description="above 1, further rounds replace groups without a signal: dynamic sampling"
    )
    max_staleness: NonNegativeInt = Field(
        description="versions that a token's weights may be behind those that learn from it; "
        "above 0, the next groups are played while the learner works"
    )
    temperature: PositiveFloat
    updates_per_step: PositiveInt = Field(description="optimizer steps on each step's samples")
    tokens_per_batch: PositiveInt = Field(
        description="token budget of one forward and backward pass, on each device"
    )
    devices: PositiveInt = Field(description="that share each update, one process on each")
    parallel: Literal["data", "fsdp"] = Field(
        description="several devices hold all that is trained, or shards of it (FSDP2)"
    )
    warm_start: WarmStartConfig
    advantage: AdvantageConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig

    @model_validator(mode="after")
    def _shards_have_an_optimizer(self) -> "TrainerConfig":
        kind = self.optimizer.type
        if self.devices > 1 and self.parallel == "fsdp" and kind != "adamw":
            raise ValueError(
                f"optimizer.type={kind} with parallel=fsdp: it needs whole matrices, of which each "
                "device would hold a part; set optimizer.type=adamw or parallel=data"
            )
        return self

    @model_validator(mode="after")
    def _groups_have_their_own_signal(self) -> "TrainerConfig":
        if self.max_sampling_rounds == 1:
            return self
        if isinstance(self.advantage, PythonAdvantageConfig):
            raise ValueError(
                f"max_sampling_rounds={self.max_sampling_rounds} with advantage.type=python: which "
                "groups have no signal is known for type=group_relative only; set "
                "max_sampling_rounds=1"
            )
        if self.advantage.baseline == "batch":
            raise ValueError(
                f"max_sampling_rounds={self.max_sampling_rounds} with advantage.baseline=batch: "
                "rounds replace groups in which all earned the same, which have a signal where "
                "they are compared with all others; set max_sampling_rounds=1"
            )
        return self
