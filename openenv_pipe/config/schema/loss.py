"""`trainer.loss`: the policy loss, its normalization and its additional terms."""

from typing import Annotated, Literal, Self

from pydantic import Field

from openenv_pipe.config.schema.base import (
    Block,
    NonNegative,
    Positive,
    PositiveCount,
    PythonTarget,
)

Hint = Literal["demonstration", "feedback"]


class KlConfig(Block):
    """The KL term of the loss. Its reference is the policy before the first step, a later one, or a
    teacher; with a hint in its prompt, the policy is its own teacher."""

    coef: NonNegative = Field(description="weight of the KL term; 0: no reference is kept")
    reference: str | None = Field(
        description="a teacher (on-policy distillation) with the policy's tokens: a folder, such "
        "as a checkpoint of a run, an id of a model that is on this machine, or the URL of a vLLM "
        "server, such as http://127.0.0.1:8000/v1, whose key is in TEACHER_API_KEY; null: the "
        "policy itself is the reference"
    )
    hint: Hint | None = Field(
        description="self-distillation: the current policy is the teacher, with a hint in its "
        "prompt; demonstration: the group's best episode, for those with a lower reward; feedback: "
        "what the environment returned last, or why the last reply could not be used; null: no hint"
    )
    estimator: Literal["k1", "k2", "k3", "exact"] = Field(
        description="k1, k2, k3: from the sampled tokens (Schulman); exact: over the whole "
        "vocabulary, to a teacher"
    )
    importance_weights: bool = Field(
        description="true: the gradient is that of the divergence; false: as in GRPO's paper"
    )
    refresh_every: PositiveCount | None = Field(
        description="interval, in steps, at which the policy becomes the reference (TRL's "
        "ref_model_sync_steps); null: the reference never changes"
    )

    @property
    def used_hint(self) -> Hint | None:
        """The hint that the policy's own teacher gets; None if there is none, or no KL term."""
        return self.hint if self.coef > 0 else None

    @property
    def has_frozen_policy(self) -> bool:
        """Whether the reference is an earlier policy: no teacher, and no hint."""
        return self.coef > 0 and self.hint is None and self.reference is None

    @property
    def has_served_teacher(self) -> bool:
        """Whether the reference is a model on a server."""
        url = self.reference or ""
        return self.coef > 0 and url.startswith(("http://", "https://"))


class CorrectionConfig(Block):
    """Importance weights (old policy / sampler), where weights, kernels or precision differ. With
    `none`, the sampler's logprobs serve as the old ones, and the clip acts on the whole ratio."""

    type: Literal["none", "truncate", "mask", "geometric", "geometric_mask"] = Field(
        description="truncate: per token, at most `high`; mask: tokens outside [low, high] are "
        "left out; geometric: one weight per sample, the geometric mean, at most `high`; "
        "geometric_mask: samples whose geometric mean is outside [low, high] are left out"
    )
    low: Positive = Field(description="smallest weight with type mask or geometric_mask")
    high: Positive


class LossBlock(Block):
    """The settings that all losses share: normalization and additional terms."""

    normalise: Literal["sample", "token", "constant"] = Field(
        description="a mean over each episode's tokens, over all tokens, or a sum over a constant"
    )
    normalise_groups: Literal["all", "with_signal"] = Field(
        description="the groups whose episodes and tokens the mean counts; all: also those without "
        "a signal, which add nothing to it; with_signal: only those that are trained on"
    )
    mask_truncated: bool = Field(
        description="episodes whose last reply a token limit cut off have no loss; other rewards "
        "are still compared with theirs"
    )
    off_policy_limit: Positive | None = Field(
        description="nats; tokens with a negative advantage are left out of samples whose tokens "
        "have on average become less likely by more than this since they were sampled "
        "(DeepSeek-V3.2); null: none are"
    )
    policy_coef: NonNegative = Field(
        description="weight of the policy loss, which follows the rewards; 0: only the other terms"
    )
    entropy_coef: NonNegative = Field(description="weight of the bonus for mean token entropy")
    echo_coef: NonNegative = Field(
        description="weight of the mean cross entropy of the environment's tokens that follow a "
        "reply (ECHO, OpenEnv's RFC 010; 0.1 there); 0: none"
    )
    router_aux_coef: NonNegative = Field(
        description="weight of the load-balancing loss of mixture-of-experts routers; 0: none"
    )
    kl: KlConfig
    correction: CorrectionConfig

    def with_teacher(self, teacher: str | None) -> Self:
        """Return this loss with another teacher; with the same one for None."""
        if teacher is None:
            return self
        return self.model_copy(update={"kl": self.kl.model_copy(update={"reference": teacher})})

    @property
    def needs_only_advantages(self) -> bool:
        """Whether tokens whose advantage is 0 add nothing to the loss and its gradient."""
        return self.kl.coef == 0 and self.entropy_coef == 0 and self.echo_coef == 0


class ClippedLossConfig(LossBlock):
    """A policy loss that clips probability ratios."""

    type: Literal["grpo", "gspo", "cispo"] = Field(
        description="grpo: PPO's clip per token; gspo: per sample; cispo: clipped weights"
    )
    clip_low: Positive
    clip_high: Positive
    max_ratio: Positive | None = Field(
        description="a bound of ratios with negative advantages, above 1 + clip_high (two-sided "
        "clip, TRL's delta); null: none"
    )

    @property
    def title(self) -> str:
        """Return the loss's name for reports."""
        return self.type


class SapoLossConfig(LossBlock):
    """SAPO: a smooth gate in place of a clip (conf/trainer/loss/sapo.yaml)."""

    type: Literal["sapo"]
    tau_positive: Positive = Field(
        description="how fast the gradient of a token with a positive advantage falls as its ratio "
        "leaves 1; larger is faster"
    )
    tau_negative: Positive = Field(description="the same for all other tokens")

    @property
    def title(self) -> str:
        return self.type


class PythonLossConfig(LossBlock, PythonTarget):
    """An `openenv_pipe.algorithms.losses.custom.CustomLoss`: target(tokens, **options)."""

    @property
    def needs_only_advantages(self) -> bool:
        """False: a user's loss may need more, which only its code says."""
        return False

    @property
    def title(self) -> str:
        return self.target


LossConfig = Annotated[
    ClippedLossConfig | SapoLossConfig | PythonLossConfig, Field(discriminator="type")
]
