"""`engine`: what generates the model's replies."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from openenv_pipe.config.schema.base import DottedPath, PositiveCount, PythonTarget
from openenv_pipe.config.schema.endpoint import EndpointBlock
from openenv_pipe.config.schema.engine_base import EngineBlock, EngineCapabilities, TruncationConfig
from openenv_pipe.config.schema.registered import Registered
from openenv_pipe.errors import ConfigError
from openenv_pipe.registry import block_types, load
from openenv_pipe.system.resources import load_callable


class LocalEngineConfig(EngineBlock):
    """The policy in the trainer's process; waiting episodes are sampled in batches."""

    capabilities = EngineCapabilities(
        takes="token_ids", can_train=True, is_exact=True, publishes_in_flight=False
    )
    samples_in_process: ClassVar[bool] = True
    type: Literal["local"]
    max_batch: PositiveCount | None = Field(
        description="episodes sampled at once; larger is faster and needs more memory for keys "
        "and values; null: as many as all servers of the environment play at once"
    )
    sampling: TruncationConfig

    @property
    def distortions(self) -> dict[str, float]:
        return self.sampling.distortions

    def sampled_at_once(self, capacity: int) -> int:
        return self.max_batch or capacity

    def memory_keys(self, *, on_gpu: bool, servers_awake: bool) -> list[str]:
        return ["engine.max_batch"]


class ScriptedEngineConfig(EngineBlock):
    """A scripted policy, fn(observations, random) -> reply. For evaluation only.

    A parameter `opening`, if it has one, receives the first messages, the tools and the action's
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

    @property
    def scripted_policy(self) -> str:
        return self.policy


class OpenAIEngineConfig(EngineBlock, EndpointBlock):
    """An OpenAI-compatible chat completions endpoint (conf/engine/openai.yaml).

    For evaluation only, because the endpoint does not return the token ids that it sampled.
    """

    capabilities = EngineCapabilities(
        takes="messages", can_train=False, is_exact=False, publishes_in_flight=True
    )
    type: Literal["openai"]
    images: bool = Field(
        description="send the images of observations, for models that accept images; false: the "
        "model reads a note in place of each"
    )
    cache_dir: str | None = Field(
        description="folder of cached responses, which equal requests reuse; null: no cache"
    )

    @property
    def player(self) -> str:
        return self.model


class PythonEngineConfig(PythonTarget, EngineBlock):
    """An `openenv_pipe.engines.base.Engine` of your own, made by target(setup, **options).

    Its class declares `capabilities`: the target is imported as soon as they are asked for.
    """

    type: Literal["python"]
    supports_vision: ClassVar[bool] = False

    @classmethod
    def declared_capabilities(cls, values: Mapping[str, Any]) -> EngineCapabilities | None:
        target = values.get("target")
        return _declared_capabilities(target) if target else None

    @property
    def capabilities(self) -> EngineCapabilities:  # type: ignore[override]
        return _declared_capabilities(self.target)


EngineConfig = Annotated[EngineBlock, Registered("engine")]


def _declared_capabilities(target: str) -> EngineCapabilities:
    """Raises ConfigError if the target cannot be imported, or declares no capabilities."""
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
    name = engine.get("type")
    if not isinstance(name, str) or (kind := block_types("engine").get(name)) is None:
        return None
    block: type[EngineBlock] = load(kind.config)
    return block.declared_capabilities(engine)
