"""`trainer.warm_start.source`: where the episodes that the warm start imitates come from."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from openenv_pipe.config.schema.base import Block, DottedPath, NumEpisodes
from openenv_pipe.config.schema.registered import Registered


class SourceBlock(Block):
    """Base of the sources of demonstrations."""

    type: str
    plays: ClassVar[bool] = False  # it plays its episodes in the environment

    @property
    def scripted_policy(self) -> str | None:
        """The scripted policy that plays, as module:name; None for all other sources."""
        return None

    @property
    def title(self) -> str:
        """What is imitated, in words for a report."""
        return self.type


class ScriptedSourceConfig(SourceBlock):
    """A scripted policy plays tasks of the train split
    (conf/trainer/warm_start/source/scripted.yaml)."""

    type: Literal["scripted"]
    plays: ClassVar[bool] = True
    policy: DottedPath | None = Field(
        description="the scripted policy, fn(observations, random) -> reply, as module:name; null "
        "without a warm start"
    )
    num_episodes: NumEpisodes = Field(
        description="episodes that the policy plays once, and steps sample from"
    )

    @property
    def scripted_policy(self) -> str | None:
        return self.policy

    @property
    def title(self) -> str:
        return f"episodes of {self.policy}"


SourceConfig = Annotated[SourceBlock, Registered("trainer.warm_start.source")]
