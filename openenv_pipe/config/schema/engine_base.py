"""What every type of `engine` declares, so that other code need not ask for the type."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from openenv_pipe.config.schema.base import Block, Count, PositiveShare

PublishMode = Literal["adapter", "merged", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCapabilities:
    """What an engine does, known from the configuration before the engine is built.

    Raises ValueError: `can_train` is True for an engine that does not take token ids.
    """

    takes: Literal["token_ids", "messages", "observations"]  # how it is given an episode
    can_train: bool  # it samples from the policy, and reports token ids and logprobs
    # Its logprobs equal the trainer's except for rounding, and equal runs give equal bytes. It gets
    # an agent's concurrent calls together, in a fixed order; other engines get each as it is made.
    is_exact: bool
    publishes_in_flight: bool  # its policy may change while a rollout batch is under way
    # With takes="messages": it is given the images of observations, not only their notes.
    sees_images: bool = False

    def __post_init__(self) -> None:
        if self.can_train and self.takes != "token_ids":
            raise ValueError(f"can_train with takes={self.takes!r}: set takes='token_ids'")

    @property
    def needs_tokenizer(self) -> bool:
        """Whether `model` is loaded, if only for its tokenizer."""
        return self.takes != "messages"

    @property
    def samples(self) -> bool:
        """Whether its replies depend on a temperature."""
        return self.takes != "observations"

    @property
    def default_correction(self) -> Literal["none", "truncate"]:
        """Return the default of `trainer.loss.correction.type`."""
        return "truncate" if self.can_train and not self.is_exact else "none"

    def default_max_mismatch(self, precision: str) -> float:
        """Return the default of `trainer.max_mismatch`, in nats per token.

        It is far above the differences that rounding and other kernels cause. precision: that of
        the trainer's matrix products, `model.autocast`.
        """
        if self.can_train and not self.is_exact:
            return 0.4
        return 0.02 if precision == "float32" else 0.2


class TruncationConfig(Block):
    """Sampling from the most likely tokens only, for evaluation; training needs it off."""

    top_p: PositiveShare = Field(
        description="sample from the most likely tokens up to this total probability; 1: off"
    )
    top_k: Count = Field(description="sample from this many of the most likely tokens; 0: off")

    @property
    def distortions(self) -> dict[str, float]:
        """The settings that are not off: with them, logprobs are not the model's own."""
        off = {"top_p": 1.0, "repetition_penalty": 1.0}
        return {key: value for key, value in self.model_dump().items() if value != off.get(key, 0)}


class EngineBlock(Block):
    """Base of the configurations of all engine types."""

    capabilities: ClassVar[EngineCapabilities]
    samples_in_process: ClassVar[bool] = False  # with the learner's weights, or a copy of them
    supports_vision: ClassVar[bool] = True  # `model` may be a vision-language model
    type: str

    @classmethod
    def declared_capabilities(cls, values: Mapping[str, Any]) -> EngineCapabilities | None:
        """Return the capabilities of an engine whose values are not validated yet.

        None: a value that they depend on is missing. Raises ConfigError if they are not declared.
        """
        return cls.capabilities

    @property
    def player(self) -> str | None:
        """Name of what plays in place of `model`; None: `model` plays."""
        return None

    @property
    def fixed_ports(self) -> Sequence[int]:
        """The ports that the servers of this engine get, if the configuration names them."""
        return ()

    @property
    def starts_servers(self) -> bool:
        return False

    @property
    def served_length(self) -> int | None:
        """The tokens of the longest episode that servers accept; None: any."""
        return None

    @property
    def scripted_policy(self) -> str | None:
        """The scripted policy that plays, as module:name; None: another engine plays."""
        return None

    @property
    def distortions(self) -> dict[str, float]:
        """The settings of `sampling` with which logprobs are not the model's own."""
        return {}

    def sampled_at_once(self, capacity: int) -> int:
        """Return how many episodes are sampled in this process at once.

        capacity: how many the environment's servers play at once.
        """
        return 0

    def publish_mode(
        self, lora_rank: int, *, dtype: str, precision: str, on_gpu: bool
    ) -> PublishMode | None:
        """Return what servers receive of a new policy; None: there is nothing to receive it.

        dtype: of the trainer's weights. precision: of its matrix products. on_gpu: whether it is
        on a GPU.
        """
        return None

    def memory_keys(self, *, on_gpu: bool, servers_awake: bool) -> list[str]:
        """Return the keys of this engine that leave the learner more memory when lowered."""
        return []
