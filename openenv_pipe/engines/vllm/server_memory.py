"""Estimate how much of the learner's memory the run's vLLM servers take.

On a GPU they hold a fixed share, unless they sleep during updates. Servers that run already are not
counted: their memory is in use.
"""

import os
from dataclasses import dataclass

from openenv_pipe.config.precision import publish_mode
from openenv_pipe.config.schema import RunConfig, VllmEngineConfig
from openenv_pipe.engines.vllm.sleep_mode import LearnerFootprint, sleep_level
from openenv_pipe.engines.vllm.transfer import MAX_WEIGHTS_FOLDERS
from openenv_pipe.models.memory_estimate import BYTES, Shape

SERVER = 1490 << 20  # measured: three processes of vLLM on a CPU, before weights and cache
FIRST_PASS_TOKENS = 8192  # in vLLM's profiling pass, unless episodes may be longer
FIRST_PASS = (8, 3)  # that pass holds 8 hidden sizes and 3 MLP sizes per token
SERVER_LOGITS = 4  # copies of the logits of all requests while they are sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerMemory:
    """Memory of the vLLM servers that the run starts on the learner's device."""

    num_servers: int
    num_bytes: int  # of all servers together, while awake
    sleep: bool = False  # whether they sleep during updates


def servers_in_machine(config: RunConfig, shape: Shape) -> ServerMemory | None:
    """Return the servers' memory if the learner uses the CPU; None if no server shares it."""
    engine = _started(config)
    if engine is None or config.cluster.serves_on_nodes:
        return None
    servers_bytes = engine.num_servers * server_bytes(shape, config, engine)
    return ServerMemory(
        num_servers=engine.num_servers,
        num_bytes=servers_bytes + _written_bytes(shape, config, engine),
    )


def _started(config: RunConfig) -> VllmEngineConfig | None:
    """Return the engine if it is vLLM with servers that the run starts."""
    engine = config.engine
    return engine if isinstance(engine, VllmEngineConfig) and engine.starts_servers else None


def server_bytes(shape: Shape, config: RunConfig, engine: VllmEngineConfig) -> int:
    """Estimate the machine's memory that a server takes on a CPU, in bytes."""
    width = BYTES[engine.served_precision(config.model.autocast)]
    head = shape.hidden_size * shape.vocabulary  # packed by vLLM, in addition to the embeddings
    kept = FIRST_PASS[0] * shape.hidden_size + FIRST_PASS[1] * shape.intermediate_size
    tokens = max(FIRST_PASS_TOKENS, engine.max_model_len)
    logits = engine.max_requests * shape.vocabulary * SERVER_LOGITS
    numbers = shape.num_parameters + head + tokens * kept
    return SERVER + numbers * width + logits * 4 + (engine.cpu_cache_gb << 30)


def _written_bytes(shape: Shape, config: RunConfig, engine: VllmEngineConfig) -> int:
    """Return the size of weight files in memory, without adapters, which are small.

    They are the base model, if it is written for the servers, and the latest published policies
    plus the next.
    """
    model = config.model
    if engine.weights_dir is not None:
        return 0
    is_base_written = model.type == "tiny" or model.quantization != "none"
    has_files = publish_mode(config) != "adapter" and engine.weight_transfer == "files"
    num_written = is_base_written + (MAX_WEIGHTS_FOLDERS + 1 if has_files else 0)
    return num_written * shape.num_parameters * BYTES[model.dtype]


def servers_on_gpu(config: RunConfig, needs_bytes: int) -> ServerMemory | None:
    """Return the servers' memory on the GPU of a learner that needs `needs_bytes`, or None."""
    engine = _started(config)
    if engine is None or not (footprint := gpu_footprint(config, needs_bytes)).shares_gpu:
        return None
    return ServerMemory(
        num_servers=engine.num_servers,
        num_bytes=int(engine.num_servers * engine.gpu_memory_share * footprint.gpu_bytes),
        sleep=sleep_level(engine, footprint, mode="adapter") > 0,
    )


def gpu_footprint(config: RunConfig, needs_bytes: int) -> LearnerFootprint:
    """Return the footprint of a learner on this machine's first GPUs."""
    import torch  # The import takes seconds, so it is done only if there is a GPU.

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(n) for n in range(torch.cuda.device_count())]
    return LearnerFootprint(
        on_gpu=True,
        free_gpus=names[config.ranks_per_node :],
        gpu_bytes=torch.cuda.get_device_properties(torch.device("cuda")).total_memory,
        needs_bytes=needs_bytes,
        plays_ahead=config.trainer.max_staleness > 0,
        servers_elsewhere=config.cluster.serves_on_nodes,
    )
