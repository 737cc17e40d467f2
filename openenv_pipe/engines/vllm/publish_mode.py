"""How weights reach vLLM servers from memory to memory, and whether they can."""

from urllib.parse import urlsplit

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.config.schema.engine_base import PublishMode
from openenv_pipe.engines.vllm.installed import Build
from openenv_pipe.engines.vllm.server_command import TransferBackend
from openenv_pipe.engines.vllm.sleep_mode import LearnerFootprint
from openenv_pipe.errors import ConfigError
from openenv_pipe.system.http import LOOPBACK


def transfer_backend(
    config: VllmEngineConfig, mode: PublishMode, build: Build
) -> TransferBackend | None:
    """Return the weight transfer of vLLM's own that servers need; None: they need none."""
    if mode == "adapter" or build == "cpu" or config.weight_transfer == "files":
        return None
    return "ipc" if config.weight_transfer == "ipc" else "nccl"


def check_transfer(config: VllmEngineConfig, footprint: LearnerFootprint) -> None:
    """Raise ConfigError if `engine.weight_transfer` does not reach the servers from the learner."""
    chosen = f"engine.weight_transfer={config.weight_transfer}"
    if config.weight_transfer == "files":
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
        _check_near(config)
    elif is_managed and shares_gpu:
        raise ConfigError(
            f"{chosen}: the servers share the learner's GPU, but NCCL connects only different "
            "GPUs; set engine.weight_transfer=ipc or files"
        )


def _check_near(config: VllmEngineConfig) -> None:
    """gloo connects over the loopback interface, and finds the server by a file."""
    for url in config.urls:
        if urlsplit(url).hostname not in LOOPBACK:
            raise ConfigError(
                f"engine.weight_transfer=broadcast from a CPU needs servers on this machine, and "
                f"{url} may be on another; expected one of {', '.join(LOOPBACK)}, or "
                "engine.weight_transfer=files"
            )
