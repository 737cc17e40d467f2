"""`reward`: the named, weighted terms of an episode's reward, and how they are composed."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from openenv_pipe.config.schema.base import Block, Number
from openenv_pipe.config.schema.registered import Registered
from openenv_pipe.config.schema.reward_terms import Term

TermConfig = Annotated[Term, Registered("reward.terms")]


class ClipTransform(Block):
    """Limits a value to a range; for a term with per_turn, the value of each turn."""

    type: Literal["clip"]
    low: Number | None = Field(description="the lowest value; null: any")
    high: Number | None = Field(description="the highest value; null: any")


class OnlySuccessTransform(Block):
    """Makes the value 0 for episodes that did not reach env.success_reward."""

    type: Literal["only_success"]


class StandardiseTransform(Block):
    """Subtracts the mean of the group's values, and divides by their standard deviation.

    Equal values become 0, and so does the value of an episode that is alone in its group.
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

    @property
    def counted(self) -> list[str]:
        """The names of the terms that the reward depends on: a weight of 0 makes a mere metric."""
        return [name for name, term in self.terms.items() if term.weight]

    @property
    def judged(self) -> list[str]:
        """The names of the terms that ask the judge."""
        return [name for name, term in self.terms.items() if term.asks_judge]

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
        relative = [name for name in self.counted if self.terms[name].is_relative]
        return list(dict.fromkeys([*relative, *self.standardised]))
