"""`engine`: what generates the model's replies."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from openenv_pipe.config.schema.base import DottedPath, PositiveCount, PythonTarget
from openenv_pipe.config.schema.endpoint import EndpointBlock
from openenv_pipe.config.schema.engine_base import EngineBlock, EngineCapabilities
from openenv_pipe.config.schema.engine_vllm import VllmEngineConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.resources import load_callable


class LocalEngineConfig(EngineBlock):
    """The policy in the trainer's process; waiting episodes are sampled in batches."""

    capabilities = EngineCapabilities(
        takes="token_ids",
        can_train=True,
        is_exact=True,
        publishes_in_flight=False,
    )
    type: Literal["local"]
    max_batch: PositiveCount | None = Field(
        description="episodes sampled at once; larger is faster and needs more memory for keys "
        "and values; null: as many as all servers of the environment play at once"
    )


class ScriptedEngineConfig(EngineBlock):
    """A scripted policy, fn(observations, random) -> reply. For evaluation only.

    If it has a parameter `opening`, that receives the first messages, the tools and the action's
    schema.
    """

    capabilities = EngineCapabilities(
        takes="observations", can_train=False, is_exact=False, publishes_in_flight=True
    )
    type: Literal["scripted"]
    policy: DottedPath = Field(description="the function, as module:name")

    @property
    def player(self) -> str:
        return self.policy


class OpenAIEngineConfig(EngineBlock, EndpointBlock):
    """A chat completions endpoint of OpenAI's form (conf/engine/openai.yaml).

    For evaluation only, because the endpoint does not return the token ids that it sampled.
    """

    capabilities = EngineCapabilities(
        takes="messages", can_train=False, is_exact=False, publishes_in_flight=True
    )
    type: Literal["openai"]
    images: bool = Field(
        description="send the images of observations, for models that accept images; false: the "
        "model reads a note of each"
    )
    cache_dir: str | None = Field(
        description="folder of responses, which equal requests reuse; null: no cache"
    )

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

    Returns None for an unknown type or a missing target, which validation rejects later. Raises
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
