"""`env`: the environment, how to talk to it, and its tasks."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from openenv_pipe.config.schema.adapter import AdapterConfig
from openenv_pipe.config.schema.base import Block, DottedPath, Text
from openenv_pipe.config.schema.tasks import TasksConfig


class EnvConfig(Block):
    """An environment and the limits of its episodes."""

    name: str
    package: str | None = Field(
        description="folder of an OpenEnv package; a bare name is an envs/ one"
    )
    python: str | None = Field(
        description="interpreter of the package's server; null: the one that runs this program"
    )
    command: list[str] | None = Field(description="starts the server instead; {host} and {port}")
    variables: dict[str, Text] = Field(description="environment variables of the server")
    reset_timeout_s: PositiveFloat
    step_timeout_s: PositiveFloat
    step_exception: Literal["failed", "unusable"] = Field(
        description="what a step is that raises on the server: the end of the episode, as failed, "
        "or a mistake of the model's, which is told and costs a turn"
    )
    max_message_mb: PositiveInt
    max_turns: PositiveInt
    max_reply_tokens: PositiveInt
    max_episode_tokens: PositiveInt
    success_reward: float = Field(
        description="the environment's reward, summed, from which on it is a success"
    )
    baselines: dict[str, DottedPath] = Field(
        description="scripted players, evaluated beside the model: expert, random, ..."
    )
    adapter: AdapterConfig
    tasks: TasksConfig
