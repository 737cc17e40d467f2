"""`judge`: the model that scores episodes for the reward terms that need a judge."""

from typing import Annotated, ClassVar, Literal

from openenv_pipe.config.schema.base import Block
from openenv_pipe.config.schema.registered import Registered


class JudgeBlock(Block):
    """Base of the judges."""

    type: str
    answers: ClassVar[bool] = True


class NoJudgeConfig(JudgeBlock):
    """No term of the reward needs a judge."""

    type: Literal["none"]
    answers: ClassVar[bool] = False


JudgeConfig = Annotated[JudgeBlock, Registered("judge")]
