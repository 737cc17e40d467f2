"""Describe a buffer on a GPU so that another process on the same machine can open it by CUDA IPC.

The description is JSON. vLLM's own form of it over HTTP is a pickle, which a server opens only with
VLLM_ALLOW_INSECURE_SERIALIZATION=1: then whoever has the key could run code in it.

The learner imports this file as a part of openenv_pipe, and vLLM's workers import it as a
top-level module, so it imports neither package.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

# Parameters of torch's rebuild_cuda_tensor, by name: their order may differ between versions.
BYTES = ("storage_handle", "ref_counter_handle", "event_handle")
NUMBERS = (
    *("tensor_offset", "storage_size_bytes", "storage_offset_bytes"),
    *("ref_counter_offset", "event_sync_required"),
)
REBUILD = inspect.signature(rebuild_cuda_tensor)


def gpu_id(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def describe(buffer: torch.Tensor) -> dict[str, Any]:
    """Describe a buffer of bytes on a CUDA GPU, for one transfer.

    torch expects that each description is opened and closed once.

    buffer: uint8, one dimension; it must stay in memory until the other process has closed it.
    """
    _, arguments = reduce_tensor(buffer)
    named = REBUILD.bind(*arguments).arguments
    return {
        "gpu": gpu_id(buffer.device),
        "num_bytes": buffer.numel(),
        **{name: named[name].hex() for name in BYTES},
        **{name: named[name] for name in NUMBERS},
    }


def rebuild_arguments(described: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of rebuild_cuda_tensor that open a described buffer."""
    named = {
        "tensor_cls": torch.Tensor,
        "tensor_size": (described["num_bytes"],),
        "tensor_stride": (1,),
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.uint8,
        "storage_device": 0,  # whoever opens it replaces this by its own number of that GPU
        "requires_grad": False,
        **{name: bytes.fromhex(described[name]) for name in BYTES},
        **{name: described[name] for name in NUMBERS},
    }
    return REBUILD.bind(**named).args
