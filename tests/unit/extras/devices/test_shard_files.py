"""What is said of files of shards that cannot be written or read."""

import errno
import os

import pytest
import torch
import torch.distributed as dist

from openenv_pipe.errors import RankLostError
from openenv_pipe.extras.devices import shard_files
from openenv_pipe.extras.devices.shard_files import read_shards, write_shards
from openenv_pipe.extras.devices.workers import Workers


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_full_disk_is_an_error_of_the_file(one_rank, tmp_path, monkeypatch):
    def full(values):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shard_files, "_bytes_of", full)
    file = tmp_path / "model.safetensors"
    with pytest.raises(OSError, match=f"No space left on device: '{file}'"):
        write_shards({"w": torch.ones(4)}, file)


def test_a_file_that_cannot_be_read_is_an_error_of_the_file(one_rank, tmp_path, monkeypatch):
    def broken(file):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    write_shards({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(shard_files, "_read_starts", broken)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}'"):
        read_shards({"w": torch.zeros(4)}, tmp_path)


def test_an_error_of_a_file_is_not_hidden_by_the_ranks_that_it_ends(tmp_path, monkeypatch):
    workers = Workers(1, torch.device("cpu"), tmp_path, num_threads=1)
    monkeypatch.setattr(workers, "_start", lambda: None)
    monkeypatch.setattr(workers, "_death", lambda: RankLostError("rank 1 ended"))
    with pytest.raises(RankLostError), workers.running("save"):
        raise OSError("Broken pipe")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")
    with pytest.raises(OSError, match=r"No space .*model\.safetensors"), workers.running("save"):
        raise full
