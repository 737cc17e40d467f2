"""`reward`: named, weighted terms over an episode."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from openenv_pipe.config.schema.base import Block, DottedPath


class Term(Block):
    """Base of the reward terms. `per_turn` credits each turn with its own value."""

    weight: float
    per_turn: bool


class EnvTerm(Term):
    """The environment's own reward: the sum over the turns, or the last one."""

    type: Literal["env"]
    use: Literal["sum", "last"]


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
    pattern: str


class OverlongTerm(Term):
    """DAPO's penalty for episodes near a limit: 0, then falling in a straight line to -1."""

    type: Literal["overlong"]
    limit_tokens: PositiveInt = Field(description="of a whole episode; from here on it is -1")
    buffer_share: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        description="of the limit: how far below it the fall begins"
    )


class PythonTerm(Term):
    """fn(episode, **keywords): a number, or one number per turn."""

    type: Literal["python"]
    target: DottedPath
    keywords: dict[str, Any]
    use: Literal["sum", "mean"] = Field(description="of the turns' values, for the episode's")


TermConfig = Annotated[
    EnvTerm
    | SuccessTerm
    | TurnsTerm
    | UnusableTerm
    | LengthTerm
    | OverlongTerm
    | RegexTerm
    | PythonTerm,
    Field(discriminator="type"),
]


class RewardConfig(Block):
    """An episode's reward is the weighted sum of its terms."""

    terms: Annotated[dict[str, TermConfig], Field(min_length=1)]
