"""Files of sharded tensors: ordinary safetensors, which `torch.distributed.checkpoint` fills.

Each rank writes and reads only its own rows, so a file neither depends on the number of ranks nor
differs from that of one process. Sharding is by the first dimension. A file in a folder that ranks
on other machines do not see is written by rank 0 alone.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from openenv_pipe.extras.devices.ranks import ConnectedRanks
from openenv_pipe.models.model_files import read_header
from openenv_pipe.system.files import naming

TYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16"}
TYPE_NAMES[torch.bfloat16] = "BF16"
ALIGNMENT = 8  # bytes, of the header
Offsets = dict[str, int]  # where each tensor begins in the file, in bytes
Layout = dict[str, tuple[torch.Size, torch.dtype]]  # of whole tensors


def write_shards(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write sharded tensors (DTensor), and tensors equal on all ranks, into a file. A collective.

    Every rank gives the same names in the same order.
    """
    with _plain_errors(file):
        save(dict(tensors), storage_writer=_SafetensorsWriter(file))


def write_gathered(tensors: Mapping[str, torch.Tensor], file: Path, ranks: ConnectedRanks) -> None:
    """Do as `write_shards`, but from rank 0 alone, which gathers one tensor at a time."""
    layout = {name: (values.shape, values.dtype) for name, values in tensors.items()}
    offsets = _make_file(file, layout) if ranks.rank == 0 else {}
    for name, values in tensors.items():
        whole = values.full_tensor() if isinstance(values, DTensor) else values
        if ranks.rank == 0:
            with naming(file), file.open("r+b") as opened:
                opened.seek(offsets[name])
                opened.write(_bytes_of(whole))


def read_shards(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Fill tensors from all safetensors files of a folder, with this rank's rows. A collective.

    Values are converted to the type of the tensor they are read into.
    """
    if tensors:
        with _plain_errors(folder):
            load(dict(tensors), storage_reader=_RowReader(str(folder)))


@contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    """Raise the first error of a rank, which names `path`, instead of torch's, a BaseException."""
    with naming(path):
        try:
            yield
        except CheckpointException as error:
            first, _ = next(iter(error.failures.values()))
            raise first from error


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes


class _RowReader(HuggingFaceStorageReader):
    """Reads only the bytes of the wanted rows, where torch's own reader maps whole files."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        starts: dict[str, Offsets] = {}
        for item in plan.items:
            name, found = item.storage_index.fqn, self.storage_data[item.storage_index]
            path = found.relative_path
            if path not in starts:
                starts[path] = _read_starts(Path(path))
            assert not any(item.storage_offsets[1:]), f"{name} is not sharded by rows"
            size_of_row = math.prod(found.shape[1:]) * found.dtype.itemsize
            first = item.storage_offsets[0] if item.storage_offsets else 0
            rows = bytearray(math.prod(item.lengths) * found.dtype.itemsize)
            with Path(path).open("rb") as file:
                file.seek(starts[path][name] + first * size_of_row)
                if file.readinto(rows) != len(rows):
                    raise OSError(f"{path} is shorter than its header says")
            target = planner.resolve_tensor(item).detach()
            if rows:
                target.copy_(torch.frombuffer(rows, dtype=found.dtype).view(item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read_starts(file: Path) -> Offsets:
    length, header = read_header(file)
    return {
        name: length + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


class _SafetensorsWriter(StorageWriter):
    """Rank 0 writes the header and sets the file's size; then each rank writes its rows."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the file is made with the global plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        layout: Layout = {}
        for plan in plans:
            for item in plan.items:
                assert item.tensor_data is not None, f"{item.index.fqn} is not a tensor"
                data = item.tensor_data
                assert data.properties.dtype is not None
                layout[item.index.fqn] = data.size, data.properties.dtype
        offsets = _make_file(self._file, layout)
        return [dataclasses.replace(plan, storage_data=offsets) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        offsets: Offsets = plan.storage_data
        with self._file.open("r+b") as file:
            for item in plan.items:
                assert item.tensor_data is not None
                values = planner.resolve_data(item)
                assert isinstance(values, torch.Tensor)
                first = item.tensor_data.chunk.offsets
                assert not any(first[1:]), f"{item.index.fqn} is not sharded by rows"
                size_of_row = math.prod(item.tensor_data.size[1:]) * values.element_size()
                file.seek(offsets[item.index.fqn] + (first[0] if first else 0) * size_of_row)
                file.write(_bytes_of(values))
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the header already says everything."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a path is given to the constructor


def _make_file(file: Path, layout: Layout) -> Offsets:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name in sorted(layout, key=lambda name: (-layout[name][1].itemsize, name)):
        size, dtype = layout[name]
        starts[name] = end
        end += math.prod(size) * dtype.itemsize
        entries[name] = {
            "dtype": TYPE_NAMES[dtype],
            "shape": list(size),
            "data_offsets": [starts[name], end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(8 + len(header) + end)
    return {name: 8 + len(header) + start for name, start in starts.items()}


def _bytes_of(values: torch.Tensor) -> memoryview:
    rows = values.detach().cpu().contiguous()
    return rows.flatten().view(torch.uint8).numpy().data
