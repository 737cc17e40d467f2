"""The types of reward terms that are computed from one episode."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from openenv_pipe.config.schema.base import Block, DottedPath, Number, PositiveCount, PositiveShare


class Term(Block):
    """Base of the reward terms."""

    type: str
    weight: Number = Field(description="factor of the term in the reward; below 0 it is a penalty")
    per_turn: bool = Field(
        description="true: each turn is credited with its own value; false: the episode is "
        "credited with their sum, as a whole"
    )
    asks_judge: ClassVar[bool] = False  # the `judge` block names the model
    replaces_reward: ClassVar[bool] = False  # clients of such a run need not report rewards
    is_relative: ClassVar[bool] = False  # it says only how the episodes of a group compare

    @property
    def first_token(self) -> float:
        """The length in tokens up to which an episode's value is always 0.

        If it is above 0, the term has the key `limit_tokens`, which an error message shows.
        """
        return 0.0


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

    @property
    def first_token(self) -> float:
        return (1.0 - self.buffer_share) * self.limit_tokens


class BrevityTerm(Term):
    """How short an episode is among those of its group (Kimi k1.5, arXiv:2501.12599).

    From 0.5 for the fewest tokens to -0.5 for the most; without success at most 0. All are 0 if
    they have the same length. An episode that is alone in its group has no value.
    """

    is_relative = True
    type: Literal["brevity"]
    per_turn: Literal[False] = Field(description="it compares whole episodes")


class PythonTerm(Term):
    """A function `target(episode, **keywords)` that returns one number, or one number per turn.

    It may be asynchronous. If it returns None, the episode has no reward.
    """

    replaces_reward = True
    type: Literal["python"]
    target: DottedPath = Field(description="the function, as module:name")
    keywords: dict[str, Any] = Field(description="its keyword arguments")
    use: Literal["sum", "mean"] = Field(
        description="how the turns' values become the episode's; mean needs per_turn=false"
    )

    @model_validator(mode="after")
    def _turns_are_not_averaged(self) -> Self:
        if self.use == "mean" and self.per_turn:
            raise ValueError(
                "use=mean with per_turn=true: turns are credited with their own values, whose sum "
                "is the episode's reward; set use=sum, or per_turn=false"
            )
        return self


class NumbersTerm(Term):
    """Base of the terms whose value is the weighted sum of named numbers, times the gates.

    Each of the numbers is a metric.
    """

    per_turn: Literal[False] = Field(description="the numbers are about the whole episode")
    weights: dict[str, Number] | None = Field(
        description="the numbers that are added up, with their factors; null: all, each with 1.0"
    )
    gates: list[str] = Field(description="the numbers that multiply the sum of the others")

    @model_validator(mode="after")
    def _gates_have_no_weight(self) -> Self:
        if set(self.gates) & set(self.weights or {}) or len(set(self.gates)) < len(self.gates):
            raise ValueError(
                f"gates={self.gates} with weights={[*(self.weights or {})]}: a gate multiplies the "
                "sum of the others; name each gate once, and none in weights"
            )
        return self


class RubricTerm(NumbersTerm):
    """Numbers that the environment reports in its observations, each with its last value.

    They are the scores of its rubrics (`metadata.rubric_scores`) by their names, and fields of
    observations by their paths, such as `board.score`.
    """

    type: Literal["rubric"]
    when_missing: Number | None = Field(
        description="stands for a number that was not reported in an episode; null: the episode "
        "has no reward"
    )


EpisodeTermConfig = (  # computed from one episode
    EnvTerm | SuccessTerm | TurnsTerm | UnusableTerm | LengthTerm | OverlongTerm | RegexTerm
)
