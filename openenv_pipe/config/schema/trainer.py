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
    """AdamW, or Muon for hidden matrices with AdamW for all else, and the learning rate."""

    type: Literal["adamw", "adamw_8bit", "muon"] = Field(
        description="adamw_8bit: AdamW whose moments take one byte each"
    )
    lr: PositiveFloat = Field(
        description="peak learning rate; larger learns faster and is less stable"
    )
    beta1: Beta = Field(description="decay of AdamW's first moment")
    beta2: Beta = Field(description="decay of AdamW's second moment")
    eps: PositiveFloat = Field(description="AdamW's term that prevents division by zero")
    weight_decay: NonNegativeFloat = Field(description="decoupled weight decay; 0: none")
    max_grad_norm: PositiveFloat = Field(description="gradients are clipped to this norm")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        description="how the learning rate changes after lr_warmup_steps"
    )
    lr_warmup_steps: NonNegativeInt = Field(
        description="first optimizer steps, in which the learning rate rises linearly"
    )
    final_lr_share: Share = Field(description="the last step's learning rate as a fraction of lr")


class WarmStartConfig(Block):
    """Supervised steps on episodes of a scripted policy, before GRPO."""

    steps: NonNegativeInt = Field(description="optimizer steps; 0: no warm start")
    policy: DottedPath | None = Field(
        description="the scripted policy, fn(observations, random) -> reply, as module:name"
    )
    num_episodes: NonNegativeInt = Field(
        description="episodes that the policy plays once, and steps sample from"
    )
    episodes_per_step: PositiveInt = Field(description="episodes of each optimizer step")
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
        description="the mean reward that is subtracted: of the group (GRPO), of the group's other "
        "episodes (RLOO), or of all episodes of the step (REINFORCE++)"
    )
    scale: Literal["group", "batch", "none"] = Field(
        description="the standard deviation that the difference is divided by: of the group, of "
        "all episodes of the step, or none (Dr. GRPO)"
    )
    discount: Share = Field(
        description="discount of later turns' per-turn rewards; 0: each turn counts only its own"
    )

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
    """Group-relative policy optimization after an optional warm start (conf/trainer/grpo.yaml)."""

    steps: NonNegativeInt = Field(description="GRPO steps")
    tasks_per_step: PositiveInt = Field(description="tasks, and so groups, of each step")
    group_size: Annotated[int, Field(ge=2)] = Field(
        description="episodes of each task; more make the advantages less noisy"
    )
    max_sampling_rounds: PositiveInt = Field(
        description="above 1, groups without a signal (all rewards equal) are replaced in up to so "
        "many rounds: dynamic sampling (DAPO)"
    )
    max_staleness: NonNegativeInt = Field(
        description="how many versions old the weights that sampled a token may be when it is "
        "trained on; above 0, the next groups are played while the learner works"
    )
    temperature: PositiveFloat = Field(
        description="sampling temperature of training; larger explores more"
    )
    updates_per_step: PositiveInt = Field(
        description="optimizer steps on each step's samples; above 1, later ones are off policy"
    )
    tokens_per_batch: PositiveInt = Field(
        description="tokens of one forward and backward pass on each device; larger is faster and "
        "needs more memory, with the same result"
    )
    devices: PositiveInt = Field(
        description="GPUs, or processes on the CPU, that share each update"
    )
    parallel: Literal["data", "fsdp"] = Field(
        description="data: every device holds the whole model; fsdp: it holds a shard of what is "
        "trained (FSDP2)"
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
                f"optimizer.type={kind} with parallel=fsdp: it needs whole matrices, and each "
                "device would hold only a part; set optimizer.type=adamw or parallel=data"
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
                "rounds replace groups whose rewards are all equal, and such groups do have a "
                "signal when compared with all others; set max_sampling_rounds=1"
            )
        return self
