"""`engine`: where tokens come from."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from openenv_pipe.config.schema.base import Block, DottedPath


class LocalEngineConfig(Block):
    """transformers in this process, batched over all waiting episodes."""

    type: Literal["local"]
    max_batch: PositiveInt


class ScriptedEngineConfig(Block):
    """Replies of a scripted policy: fn(observations, random) -> reply. Evaluation only."""

    type: Literal["scripted"]
    policy: DottedPath


EngineConfig = Annotated[LocalEngineConfig | ScriptedEngineConfig, Field(discriminator="type")]
