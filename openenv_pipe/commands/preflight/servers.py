"""What the run's vLLM servers take of the memory that its learner works in.

Of a GPU they have a share that they keep, unless they sleep while it learns; of a machine's memory
what `footprint` estimates. Not counted: servers that run already, whose memory is not free anyway.
"""

from dataclasses import dataclass

from openenv_pipe.config.schema import RunConfig, VllmEngineConfig
from openenv_pipe.engines.vllm.publish import MAX_WEIGHTS_FOLDERS
from openenv_pipe.engines.vllm.sleep_mode import sleep_level
from openenv_pipe.models.memory_estimate import BYTES, Shape, server_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Servers that this run starts beside its learner."""

    num_servers: int
    num_bytes: int  # of all of them, awake
    sleep: bool = False  # while it learns


def servers_in_machine(config: RunConfig, shape: Shape) -> Beside | None:
    """Where the learner works on a CPU."""
    engine = config.engine
    if engine.type != "vllm" or engine.launch == "attach":
        return None
    num_bytes = engine.num_servers * server_bytes(shape, config) + _written_bytes(
        shape, config, engine
    )
    return Beside(num_servers=engine.num_servers, num_bytes=num_bytes)


def _written_bytes(shape: Shape, config: RunConfig, engine: VllmEngineConfig) -> int:
    """Weights that lie in memory as files: the base, where it is written for the servers, and the
    last policies and the one on its way. Adapters are small."""
    model = config.model
    if engine.weights_dir is not None:
        return 0
    is_base_written = model.type == "tiny" or model.quantization != "none"
    is_whole = model.lora.rank == 0 or engine.publish == "merged"
    has_files = is_whole and engine.weight_transfer != "broadcast"
    num_written = is_base_written + (MAX_WEIGHTS_FOLDERS + 1 if has_files else 0)
    return num_written * shape.num_parameters * BYTES[model.dtype]


def servers_on_gpu(config: RunConfig, needs_bytes: int) -> Beside | None:
    """needs_bytes: of the learner while it learns, which decides whether they sleep then."""
    engine = config.engine
    if engine.type != "vllm" or engine.launch == "attach":
        return None
    from openenv_pipe.pipeline.build import gpu_footprint  # brings torch

    footprint = gpu_footprint(config, needs_bytes)
    if footprint.free_gpus:
        return None
    return Beside(
        num_servers=engine.num_servers,
        num_bytes=int(engine.num_servers * engine.gpu_memory_share * footprint.gpu_bytes),
        sleep=sleep_level(engine, footprint, mode="adapter") > 0,
    )
