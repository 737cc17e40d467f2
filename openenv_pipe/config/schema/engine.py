"""`engine`: where tokens come from."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from openenv_pipe.config.schema.base import Block, DottedPath, ServerUrl
from openenv_pipe.config.schema.engine_vllm import VllmEngineConfig


class LocalEngineConfig(Block):
    """transformers in this process, batched over all waiting episodes."""

    type: Literal["local"]
    max_batch: PositiveInt


class ScriptedEngineConfig(Block):
    """Replies of a scripted policy: fn(observations, random) -> reply. Evaluation only.

    A parameter `opening` of it gets the first messages, the tools and the action's schema.
    """

    type: Literal["scripted"]
    policy: DottedPath


class OpenAIEngineConfig(Block):
    """A chat endpoint in OpenAI's way. Evaluation only: it does not say which ids it sampled."""

    type: Literal["openai"]
    base_url: ServerUrl = Field(description="what stands before /chat/completions")
    model: str
    api_key: str | None = Field(description="null: none is sent")
    max_concurrent: PositiveInt = Field(description="requests, and so episodes, at once")
    requests_per_minute: PositiveInt | None = Field(description="null: no limit of ours")
    tokens_per_minute: PositiveInt | None = Field(
        description="prompt and the longest possible reply, estimated; null: no limit of ours"
    )
    max_tokens_key: Literal["max_completion_tokens", "max_tokens"] = Field(
        description="the field that bounds a reply; older servers know the second only"
    )
    parameters: dict[str, Any] = Field(
        description="further fields of each request, over ours; null leaves one out"
    )
    timeout_s: PositiveFloat = Field(description="of one request")
    max_retries: NonNegativeInt
    cache_dir: str | None = Field(description="of responses, by request; null: none are kept")


EngineConfig = Annotated[
    LocalEngineConfig | ScriptedEngineConfig | OpenAIEngineConfig | VllmEngineConfig,
    Field(discriminator="type"),
]
