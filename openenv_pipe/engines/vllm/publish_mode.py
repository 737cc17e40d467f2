"""How weights reach vLLM servers, and whether they can."""

from openenv_pipe.config.schema import VllmEngineConfig
from openenv_pipe.config.schema.engine_base import PublishMode
from openenv_pipe.engines.vllm.installed import Build
from openenv_pipe.engines.vllm.server_command import TransferBackend
from openenv_pipe.engines.vllm.sleep_mode import LearnerFootprint
from openenv_pipe.registry import block_types, load

BACKENDS: dict[str, TransferBackend] = {"broadcast": "nccl", "ipc": "ipc"}


def transfer_backend(
    config: VllmEngineConfig, mode: PublishMode, build: Build
) -> TransferBackend | None:
    """Return the backend of vLLM's own weight transfer that servers need; None: they need none."""
    if mode == "adapter" or build == "cpu":
        return None
    return BACKENDS.get(config.weight_transfer)


def check_transfer(config: VllmEngineConfig, footprint: LearnerFootprint) -> None:
    """Raise ConfigError if `engine.weight_transfer` does not reach the servers from the learner."""
    if check := block_types("engine.weight_transfer")[config.weight_transfer].check:
        load(check)(config, footprint)
