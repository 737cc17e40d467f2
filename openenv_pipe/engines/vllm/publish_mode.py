"""Choose what of a policy is published, and refuse what does not fit the configuration."""

from typing import Literal

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.sleep_mode import LearnerFootprint
from openenv_pipe.errors import ConfigError

PublishMode = Literal["adapter", "merged", "full"]


def choose_publish_mode(config: VllmEngineConfig, lora_rank: int) -> PublishMode:
    """Return `engine.publish`, or what `auto` means for this model.

    Raises:
        ConfigError: `engine.publish` does not fit the model.
    """
    if config.publish == "auto":
        return "adapter" if lora_rank else "full"
    if (config.publish == "full") == bool(lora_rank):
        fits = "full" if not lora_rank else "adapter or merged"
        raise ConfigError(
            f"engine.publish={config.publish} does not fit model.lora.rank={lora_rank}; "
            f"expected {fits}, or auto"
        )
    return config.publish


def refuse_broadcast(
    config: VllmEngineConfig, footprint: LearnerFootprint, mode: PublishMode
) -> None:
    """Raise ConfigError if `engine.weight_transfer=broadcast` is set and cannot work."""
    if config.weight_transfer == "files":
        return
    if mode == "adapter":
        raise ConfigError(
            "engine.weight_transfer=broadcast can send all weights but no adapter, which "
            f"engine.publish={config.publish} publishes; set engine.publish=merged, or "
            "engine.weight_transfer=files"
        )
    if config.launch == "managed" and footprint.on_gpu and not footprint.free_gpus:
        raise ConfigError(
            "engine.weight_transfer=broadcast: the servers share the learner's GPU, but NCCL "
            "connects only different GPUs; set engine.weight_transfer=files"
        )
