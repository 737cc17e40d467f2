"""Estimate how much of the learner's memory the run's vLLM servers take.

On a GPU they hold a fixed share, unless they sleep during updates. In a machine's main memory they
take what `memory_estimate` says. Servers that run already are not counted: their memory is in use.
"""

from dataclasses import dataclass

from openenv_pipe.config.schema import RunConfig, VllmEngineConfig
from openenv_pipe.engines.vllm.sleep_mode import sleep_level
from openenv_pipe.engines.vllm.transfer import MAX_WEIGHTS_FOLDERS
from openenv_pipe.models.memory_estimate import BYTES, Shape, server_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerMemory:
    """Memory of the vLLM servers that the run starts on the learner's device."""

    num_servers: int
    num_bytes: int  # of all servers together, while awake
    sleep: bool = False  # whether they sleep during updates


def servers_in_machine(config: RunConfig, shape: Shape) -> ServerMemory | None:
    """Return the servers' memory if the learner uses the CPU; None if it has none here."""
    engine = config.engine
    if engine.type != "vllm" or engine.launch == "attach" or config.cluster.serves_on_nodes:
        return None
    num_bytes = engine.num_servers * server_bytes(shape, config) + _written_bytes(
        shape, config, engine
    )
    return ServerMemory(num_servers=engine.num_servers, num_bytes=num_bytes)


def _written_bytes(shape: Shape, config: RunConfig, engine: VllmEngineConfig) -> int:
    """Return the size of weight files in memory: the base model, if it is written for the servers,
    and the latest published policies plus the next. Adapters are small and not counted."""
    model = config.model
    if engine.weights_dir is not None:
        return 0
    is_base_written = model.type == "tiny" or model.quantization != "none"
    is_whole = model.lora.rank == 0 or engine.publish == "merged"
    has_files = is_whole and engine.weight_transfer == "files"
    num_written = is_base_written + (MAX_WEIGHTS_FOLDERS + 1 if has_files else 0)
    return num_written * shape.num_parameters * BYTES[model.dtype]


def servers_on_gpu(config: RunConfig, needs_bytes: int) -> ServerMemory | None:
    """Return the servers' memory on the GPU of a learner that needs `needs_bytes`, or None."""
    engine = config.engine
    if engine.type != "vllm" or engine.launch == "attach":
        return None
    from openenv_pipe.pipeline.build import gpu_footprint  # imports torch

    footprint = gpu_footprint(config, needs_bytes)
    if not footprint.shares_gpu:
        return None
    return ServerMemory(
        num_servers=engine.num_servers,
        num_bytes=int(engine.num_servers * engine.gpu_memory_share * footprint.gpu_bytes),
        sleep=sleep_level(engine, footprint, mode="adapter") > 0,
    )
