"""Choose what of a policy is published, and refuse what does not fit the configuration."""

from typing import Literal
from urllib.parse import urlsplit

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.engines.vllm.install import Build
from openenv_pipe.engines.vllm.server_command import TransferBackend
from openenv_pipe.engines.vllm.sleep_mode import LearnerFootprint
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.http import LOOPBACK

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


def transfer_backend(
    config: VllmEngineConfig, mode: PublishMode, build: Build
) -> TransferBackend | None:
    """Return the weight transfer of vLLM's own that servers need; None: they need none."""
    if mode == "adapter" or build == "cpu" or config.weight_transfer == "files":
        return None
    return "ipc" if config.weight_transfer == "ipc" else "nccl"


def refuse_transfer(
    config: VllmEngineConfig, footprint: LearnerFootprint | None, mode: PublishMode
) -> None:
    """Raise ConfigError if `engine.weight_transfer` cannot work.

    Args:
        footprint: None if it is not known, so that only the other settings are checked.
    """
    chosen = f"engine.weight_transfer={config.weight_transfer}"
    if config.weight_transfer == "files":
        return
    if mode == "adapter":
        raise ConfigError(
            f"{chosen} can send all weights but no adapter, which "
            f"engine.publish={config.publish} publishes; set engine.publish=merged, or "
            "engine.weight_transfer=files"
        )
    if footprint is None:
        return
    is_managed, shares_gpu = config.launch == "managed", footprint.shares_gpu
    if config.weight_transfer == "ipc":
        if not footprint.on_gpu:
            raise ConfigError(
                f"{chosen} needs a GPU that learner and server share, and this run learns on a "
                "CPU; set engine.weight_transfer=broadcast or files"
            )
        if is_managed and not shares_gpu:
            raise ConfigError(
                f"{chosen}: the servers run on GPUs that the learner does not use; set "
                "engine.weight_transfer=broadcast, or hide those GPUs by CUDA_VISIBLE_DEVICES"
            )
    elif not footprint.on_gpu:
        if footprint.servers_elsewhere:
            raise ConfigError(
                f"{chosen} from a CPU needs servers on this machine, and "
                "cluster.vllm_on_nodes=true; set engine.weight_transfer=files"
            )
        _refuse_remote_servers(config)
    elif is_managed and shares_gpu:
        raise ConfigError(
            f"{chosen}: the servers share the learner's GPU, but NCCL connects only different "
            "GPUs; set engine.weight_transfer=ipc or files"
        )


def _refuse_remote_servers(config: VllmEngineConfig) -> None:
    """gloo connects over the loopback interface, and finds the server by a file."""
    for url in config.urls:
        if urlsplit(url).hostname not in LOOPBACK:
            raise ConfigError(
                f"engine.weight_transfer=broadcast from a CPU needs servers on this machine, and "
                f"{url} may be on another; expected one of {', '.join(LOOPBACK)}, or "
                "engine.weight_transfer=files"
            )
