"""`reward`: the named, weighted terms of an episode's reward."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from openenv_pipe.config.schema.base import Block, DottedPath, Number, PositiveCount, PositiveShare


class Term(Block):
    """Base of the reward terms."""

    weight: Number = Field(description="factor of the term in the reward; below 0 it is a penalty")
    per_turn: bool = Field(
        description="true: each turn is credited with its own value; false: the episode is "
        "credited with their sum, as a whole"
    )
    asks_judge: ClassVar[bool] = False  # the `judge` block says which model that is


class EnvTerm(Term):
    """The environment's own reward."""

    type: Literal["env"]
    use: Literal["sum", "last"] = Field(description="the sum over the turns, or the last reward")


class SuccessTerm(Term):
    """1 for an episode that reached env.success_reward."""

    type: Literal["success"]


class TurnsTerm(Term):
    """The number of turns used."""

    type: Literal["turns"]


class UnusableTerm(Term):
    """The number of replies that could not be turned into an action."""

    type: Literal["unusable"]


class LengthTerm(Term):
    """The number of tokens that the model wrote."""

    type: Literal["length"]


class RegexTerm(Term):
    """The number of replies in which the pattern is found."""

    type: Literal["regex"]
    pattern: str = Field(description="regular expression, searched in each reply")


class OverlongTerm(Term):
    """DAPO's penalty for long episodes: 0, then falling linearly to -1 (arXiv:2503.14476)."""

    type: Literal["overlong"]
    limit_tokens: PositiveCount = Field(description="tokens of an episode from which it is -1")
    buffer_share: PositiveShare = Field(
        description="fraction of limit_tokens below it at which the penalty starts to fall"
    )


class RulerTerm(Term):
    """A judge compares the episodes of a group and gives each of them a number in 0..1 (RULER).

    Groups with one episode, as in most evaluations, have nothing to compare and no value.
    """

    asks_judge = True
    type: Literal["ruler"]
    per_turn: Literal[False] = Field(description="a verdict is about the whole episode")
    rubric: str = Field(description="what makes an episode better, in words for the judge")
    num_orders: Annotated[int, Field(ge=1, le=100)] = Field(
        description="in how many random orders the episodes are shown; their scores are averaged"
    )
    max_group: Annotated[int, Field(ge=4, le=1000)] = Field(
        description="episodes in one prompt; larger groups are split, with two episodes in all "
        "parts that make their scores comparable"
    )


class PythonTerm(Term):
    """A function `target(episode, **keywords)` that returns one number, or one number per turn."""

    type: Literal["python"]
    target: DottedPath = Field(description="the function, as module:name")
    keywords: dict[str, Any] = Field(description="its keyword arguments")
    use: Literal["sum", "mean"] = Field(
        description="how the turns' values become the episode's; mean needs per_turn=false"
    )

    @model_validator(mode="after")
    def _credits_what_it_reports(self) -> "PythonTerm":
        if self.use == "mean" and self.per_turn:
            raise ValueError(
                "use=mean with per_turn=true: turns are credited with their own values, whose sum "
                "is the episode's reward; set use=sum, or per_turn=false"
            )
        return self


EpisodeTermConfig = (  # computed from one episode
    EnvTerm
    | SuccessTerm
    | TurnsTerm
    | UnusableTerm
    | LengthTerm
    | OverlongTerm
    | RegexTerm
    | PythonTerm
)
TermConfig = Annotated[EpisodeTermConfig | RulerTerm, Field(discriminator="type")]


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


def _refuse_turns(key: str, kind: str, term: Term) -> None:
    if term.per_turn:
        raise ValueError(f"{key}: {kind} is about whole episodes; set the term's per_turn=false")


def _refuse_weight(key: str, term: Term) -> None:
    if term.weight != 1.0:
        raise ValueError(
            f"{key}: a term that multiplies has no weight of its own; set weight=1.0 in place of "
            f"{term.weight:g}"
        )
