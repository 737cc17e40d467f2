"""`reward`: the named, weighted terms of an episode's reward, and how they are composed."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from openenv_pipe.config.schema.base import Block, Number
from openenv_pipe.config.schema.reward_judged import JudgeTerm, RulerTerm
from openenv_pipe.config.schema.reward_reported import RubricTerm, VerifierTerm
from openenv_pipe.config.schema.reward_terms import EpisodeTermConfig, PythonTerm, Term

TermConfig = Annotated[
    EpisodeTermConfig | PythonTerm | RubricTerm | RulerTerm | JudgeTerm | VerifierTerm,
    Field(discriminator="type"),
]


class ClipTransform(Block):
    """Limits a value to a range; for a term with per_turn, the value of each turn."""

    type: Literal["clip"]
    low: Number | None = Field(description="the lowest value; null: any")
    high: Number | None = Field(description="the highest value; null: any")

    @model_validator(mode="after")
    def _is_a_range(self) -> "ClipTransform":
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low={self.low:g} is more than high={self.high:g}")
        return self


class OnlySuccessTransform(Block):
    """Makes the value 0 for episodes that did not reach env.success_reward."""

    type: Literal["only_success"]


class StandardiseTransform(Block):
    """Subtracts the mean of the group's values, and divides by their standard deviation.

    Values that do not differ become 0, and so does that of an episode that is alone in its group.
    """

    type: Literal["standardise"]


class MultiplyTransform(Block):
    """Makes the term a gate: the sum of the other terms is multiplied by its value."""

    type: Literal["multiply"]


TransformConfig = Annotated[
    ClipTransform | OnlySuccessTransform | StandardiseTransform | MultiplyTransform,
    Field(discriminator="type"),
]
RESERVED_NAMES = ("mean", "std")  # reward/mean and reward/std are metrics of the whole reward


class RewardConfig(Block):
    """An episode's reward is the weighted sum of its terms, times its gates."""

    terms: Annotated[dict[str, TermConfig], Field(min_length=1)]
    transforms: dict[str, list[TransformConfig]] = Field(
        description="by term, what its value goes through, in this order, before it is weighted"
    )

    @field_validator("terms")
    @classmethod
    def _leave_metrics_alone(cls, terms: dict[str, TermConfig]) -> dict[str, TermConfig]:
        for name in RESERVED_NAMES:
            if name in terms:
                raise ValueError(
                    f"a term named {name!r} would be written as reward/{name}, which is the "
                    f"{name} of the whole reward; give the term another name"
                )
        return terms

    @model_validator(mode="after")
    def _transforms_fit(self) -> "RewardConfig":
        for name, transforms in self.transforms.items():
            key = f"transforms.{name}"
            if name not in self.terms:
                raise ValueError(f"{key}: there is no such term, only {', '.join(self.terms)}")
            for transform in transforms:
                if isinstance(transform, StandardiseTransform | MultiplyTransform):
                    _refuse_turns(key, transform.type, self.terms[name])
            if any(isinstance(each, MultiplyTransform) for each in transforms[:-1]):
                raise ValueError(f"{key}: multiply has to be the last transform")
            if transforms and isinstance(transforms[-1], MultiplyTransform):
                _refuse_weight(key, self.terms[name])
        return self

    @property
    def counted(self) -> list[str]:
        """The names of the terms that the reward depends on: a weight of 0 makes a mere metric."""
        return [name for name, term in self.terms.items() if term.weight]

    @property
    def standardised(self) -> list[str]:
        """The names of counted terms that are standardised, whose mean over a group is always 0."""
        return [
            name
            for name in self.counted
            if any(isinstance(each, StandardiseTransform) for each in self.transforms.get(name, []))
        ]

    @property
    def relative(self) -> list[str]:
        """The names of counted terms that say only how the episodes of a group compare."""
        rulers = [name for name in self.counted if isinstance(self.terms[name], RulerTerm)]
        return list(dict.fromkeys([*rulers, *self.standardised]))


def _refuse_turns(key: str, kind: str, term: Term) -> None:
    if term.per_turn:
        raise ValueError(f"{key}: {kind} is about whole episodes; set the term's per_turn=false")


def _refuse_weight(key: str, term: Term) -> None:
    if term.weight != 1.0:
        raise ValueError(
            f"{key}: a term that multiplies has no weight of its own; set weight=1.0 in place of "
            f"{term.weight:g}"
        )
