"""`trainer`: GRPO, its loss and optimizer, and the optional warm start."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from openenv_pipe.config.schema.base import (
    MIN_TEMPERATURE,
    Block,
    Count,
    NonNegative,
    Number,
    NumEpisodes,
    NumProcesses,
    Positive,
    PositiveCount,
    PythonTarget,
    Share,
    ShareBelowOne,
)
from openenv_pipe.config.schema.loss import LossConfig
from openenv_pipe.config.schema.source import SourceConfig


class OptimizerConfig(Block):
    """AdamW, or Muon for hidden matrices with AdamW for all else, and the learning rate."""

    type: Literal["adamw", "adamw_8bit", "muon"] = Field(
        description="adamw_8bit: AdamW whose moments take one byte each"
    )
    lr: Positive = Field(description="peak learning rate; larger learns faster and is less stable")
    beta1: ShareBelowOne = Field(description="decay of AdamW's first moment")
    beta2: ShareBelowOne = Field(description="decay of AdamW's second moment")
    eps: Positive = Field(description="AdamW's term that prevents division by zero")
    weight_decay: NonNegative = Field(description="decoupled weight decay; 0: none")
    max_grad_norm: Positive = Field(description="gradients are clipped to this norm")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        description="how the learning rate changes after lr_warmup_steps"
    )
    lr_warmup_steps: Count = Field(
        description="first optimizer steps, in which the learning rate rises linearly"
    )
    final_lr_share: Share | None = Field(
        description="the last step's learning rate as a fraction of lr; null: 0 for the schedules "
        "that decay, 1 for constant"
    )


class WarmStartConfig(Block):
    """Supervised steps on demonstrations, before GRPO."""

    steps: Count = Field(description="optimizer steps; 0: no warm start")
    source: SourceConfig = Field(description="where the imitated episodes come from")
    episodes_per_step: NumEpisodes = Field(description="episodes of each optimizer step")
    optimizer: OptimizerConfig


class ReplayConfig(Block):
    """Good earlier episodes, which an additional loss teaches the policy to repeat."""

    coef: Positive = Field(
        description="weight of the mean cross entropy of the replies' tokens in replayed episodes"
    )
    size: NumEpisodes = Field(
        description="most episodes to keep, one for each task and player; beyond it, the lowest "
        "reward of the environment with the most episodes is dropped, the oldest first"
    )
    min_reward: Number | None = Field(
        description="lowest reward of an episode to keep; null: it has to be above the mean of its "
        "group"
    )
    per_step: NumEpisodes = Field(
        description="episodes that each step draws from those that earlier steps have kept"
    )


class GroupRelativeAdvantageConfig(Block):
    """Group-relative advantages: (reward - baseline) / scale."""

    type: Literal["group_relative"]
    baseline: Literal["group", "leave_one_out", "batch"] = Field(
        description="the mean reward that is subtracted: of the group (GRPO), of the group's other "
        "episodes (RLOO), or of all episodes of the step (REINFORCE++)"
    )
    scale: Literal["group", "batch", "terms", "mean", "none"] = Field(
        description="what the difference is divided by: the standard deviation of the group or of "
        "all episodes of the step; terms: of each term of the reward in the group, and of their "
        "sum in the step, with one advantage for all turns (GDPO); the group's mean reward "
        "(MaxRL); or nothing (Dr. GRPO)"
    )
    discount: Share = Field(
        description="discount of later turns' per-turn rewards; 0: each turn counts only its own"
    )


class PythonAdvantageConfig(PythonTarget):
    """An `algorithms.custom_advantages.CustomAdvantages`: target(groups, **options)."""


AdvantageConfig = Annotated[
    GroupRelativeAdvantageConfig | PythonAdvantageConfig, Field(discriminator="type")
]

OF_EVALUATIONS = ("eval/success", "eval/reward")


class BestConfig(Block):
    """Which checkpoint `checkpoints/best` points to. Each new best one is saved at once."""

    metric: str = Field(
        description="the metric that decides: a key of metrics.jsonl in the step whose episodes "
        "the checkpoint's weights have played, or eval/success or eval/reward of the evaluations "
        "that eval.during makes",
        examples=["reward/mean"],
    )
    direction: Literal["max", "min"] = Field(description="whether a high or a low value is best")

    @model_validator(mode="after")
    def _evaluations_have_two(self) -> "BestConfig":
        if self.metric.startswith("eval/") and self.metric not in OF_EVALUATIONS:
            raise ValueError(
                f"metric={self.metric!r}: evaluations have only {' and '.join(OF_EVALUATIONS)}"
            )
        return self


class CheckpointConfig(Block):
    """When checkpoints are written, and which are kept (conf/trainer/grpo.yaml)."""

    every: PositiveCount = Field(
        description="steps between checkpoints; the last step always has one"
    )
    every_minutes: Positive | None = Field(
        description="minutes without a checkpoint after which a step saves one for `--resume` "
        "only, which the next checkpoint replaces; null: never"
    )
    keep_last: PositiveCount | None = Field(
        description="how many of the newest are kept beside the best; null: all. A checkpoint "
        "without a value of best.metric is never deleted"
    )
    num_resumable: PositiveCount = Field(
        description="how many of the newest keep the optimizer's state, which `--resume` needs "
        "and which with AdamW is twice the size of the trained weights"
    )
    best: BestConfig | None = Field(
        description="null: no best checkpoint is chosen, and none saved beside the others"
    )

    @property
    def best_by_evaluations(self) -> bool:
        """Whether evaluations during training decide which checkpoint is best."""
        return self.best is not None and self.best.metric.startswith("eval/")


class TrainerConfig(Block):
    """Group-relative policy optimization after an optional warm start (conf/trainer/grpo.yaml)."""

    steps: Count = Field(description="GRPO steps")
    tasks_per_step: NumEpisodes = Field(description="tasks, and so groups, of each step")
    group_size: Annotated[int, Field(ge=2, le=10**6)] = Field(
        description="episodes of each task; more make the advantages less noisy"
    )
    max_sampling_rounds: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="above 1, groups without a signal (all rewards equal) are replaced by those of "
        "further tasks, in up to this many rounds in all: dynamic sampling (DAPO)"
    )
    max_staleness: Annotated[int, Field(ge=0, le=100)] = Field(
        description="how many versions old the weights that sampled a token may be when it is "
        "trained on; above 0, the next groups are played while the learner works"
    )
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=100.0)] = Field(
        description="sampling temperature of training; larger explores more"
    )
    updates_per_step: PositiveCount = Field(
        description="optimizer steps of each pass over a step's samples, which they share out; "
        "above 1, later ones are off policy"
    )
    passes_per_step: PositiveCount = Field(
        description="passes over each step's samples (mu of GRPO's paper); above 1, later ones are "
        "off policy, and the clip of the loss bounds how far they go"
    )
    unusable_limit: Share = Field(
        description="a run warns if the fraction of unusable replies has risen above this: the "
        "model has learned not to act; 1: never"
    )
    max_mismatch: Positive = Field(
        description="nats; the run ends if the logprobs of sampler and trainer differ by more than "
        "this in the mean over a step's tokens, or by 50 times as much in one token; it warns from "
        "a quarter, or 10 times, on; a step with tokens of older weights (max_staleness) only "
        "warns, and each version in between adds 0.2 to the bound of the mean"
    )
    guard: Literal["warn", "stop", "back"] = Field(
        description="what to do when updates destroy the policy: its reward falls far below its "
        "best, its entropy collapses, gradients grow tenfold, its replies become unusable, or no "
        "group has a signal any more; warn; stop; or go back to the best checkpoint and go on with "
        "a third of the learning rate, at most three times"
    )
    tokens_per_batch: PositiveCount = Field(
        description="tokens of one forward and backward pass on each device; larger is faster and "
        "needs more memory, with the same result"
    )
    devices: NumProcesses = Field(
        description="GPUs, or processes on the CPU, that share each update"
    )
    parallel: Literal["data", "fsdp"] = Field(
        description="data: every device holds the whole model; fsdp: each holds a shard of all "
        "weights, gradients and optimizer state (FSDP2)"
    )
    replicas: NumProcesses = Field(
        description="with parallel=fsdp, groups of devices that each hold the whole model, sharded "
        "within the group (HSDP); a divisor of devices"
    )
    warm_start: WarmStartConfig
    advantage: AdvantageConfig
    loss: LossConfig
    replay: ReplayConfig | None = Field(
        description="the best episode of each task is trained on again; null: none is"
    )
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig

    @property
    def episodes_per_step(self) -> int:
        return self.tasks_per_step * self.group_size

    @property
    def total_updates_per_step(self) -> int:
        """The optimizer steps of all passes over a step's samples."""
        return self.passes_per_step * self.updates_per_step

    @property
    def is_sharded(self) -> bool:
        """Whether each of several devices holds a shard of the policy."""
        return self.devices > 1 and self.parallel == "fsdp"
