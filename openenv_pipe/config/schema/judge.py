"""`judge`: the model that scores episodes for the reward terms that need a judge."""

from collections.abc import Collection
from typing import Annotated, ClassVar, Literal

from openenv_pipe.config.schema.base import Block
from openenv_pipe.config.schema.registered import Registered


class JudgeBlock(Block):
    """Base of the judges."""

    type: str
    answers: ClassVar[bool] = True
    # The keys that, beside the type, decide what a verdict is; None: all. Others are limits and
    # prices.
    verdict_keys: ClassVar[Collection[str] | None] = None

    @classmethod
    def decides(cls, key: str) -> bool:
        """Return whether a verdict may be another one with another value of this key."""
        return cls.verdict_keys is None or key == "type" or key in cls.verdict_keys


class NoJudgeConfig(JudgeBlock):
    """No term of the reward needs a judge."""

    type: Literal["none"]
    answers: ClassVar[bool] = False


JudgeConfig = Annotated[JudgeBlock, Registered("judge")]
