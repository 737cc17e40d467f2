"""`engine`: where tokens come from."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from openenv_pipe.config.schema.base import DottedPath, PythonTarget, ServerUrl
from openenv_pipe.config.schema.engine_base import EngineBlock, EngineCapabilities
from openenv_pipe.config.schema.engine_vllm import VllmEngineConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.resources import load_callable


class LocalEngineConfig(EngineBlock):
    """transformers in this process, batched over all waiting episodes."""

    capabilities = EngineCapabilities(
        takes="token_ids", can_train=True, is_exact=True, publishes_in_flight=False
    )
    type: Literal["local"]
    max_batch: PositiveInt


class ScriptedEngineConfig(EngineBlock):
    """Replies of a scripted policy: fn(observations, random) -> reply. Evaluation only.

    A parameter `opening` of it gets the first messages, the tools and the action's schema.
    """

    capabilities = EngineCapabilities(
        takes="observations", can_train=False, is_exact=False, publishes_in_flight=True
    )
    type: Literal["scripted"]
    policy: DottedPath

    @property
    def player(self) -> str:
        return self.policy


class OpenAIEngineConfig(EngineBlock):
    """An endpoint with OpenAI's chat completions. For evaluation only: it tells no token ids."""

    capabilities = EngineCapabilities(
        takes="messages", can_train=False, is_exact=False, publishes_in_flight=True
    )
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

    @property
    def player(self) -> str:
        return self.model


class PythonEngineConfig(EngineBlock, PythonTarget):
    """An `openenv_pipe.engines.base.Engine` of your own, made by target(setup, **options).

    Its class declares `capabilities`: the target is imported as soon as they are asked for.
    """

    @property
    def capabilities(self) -> EngineCapabilities:  # type: ignore[override]
        return _declared_capabilities(self.target)


EngineConfig = Annotated[
    LocalEngineConfig
    | ScriptedEngineConfig
    | OpenAIEngineConfig
    | VllmEngineConfig
    | PythonEngineConfig,
    Field(discriminator="type"),
]


def _declared_capabilities(target: str) -> EngineCapabilities:
    """Raises ConfigError if the target cannot be imported, or declares none."""
    declared = getattr(load_callable(target), "capabilities", None)
    if not isinstance(declared, EngineCapabilities):
        raise ConfigError(
            f"engine.target={target!r} declares capabilities={declared!r}; expected a class with "
            "capabilities = EngineCapabilities(...) of openenv_pipe.config.schema"
        )
    return declared


def capabilities_of(engine: Mapping[str, Any]) -> EngineCapabilities | None:
    """The capabilities of an engine whose values are not validated yet.

    Returns None for an unknown type or a missing target, which validation refuses later. Raises
    ConfigError for a target that declares none.
    """
    union, _ = get_args(EngineConfig)
    for block in get_args(union):
        if engine.get("type") in get_args(block.model_fields["type"].annotation):
            if block is not PythonEngineConfig:
                return block.capabilities
            target = engine.get("target")
            return _declared_capabilities(target) if target else None
    return None
